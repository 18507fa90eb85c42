"""A verifiers taskset: questions with four options and a passage that holds the answer; here one seat answers them."""

from sample_questions.playing import AnswerEnv
from sample_questions.taskset import QuestionTaskset

__all__ = ["AnswerEnv", "QuestionTaskset"]
