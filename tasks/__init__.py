"""What happens: a folder for each stage; inference and the learner beside them."""
