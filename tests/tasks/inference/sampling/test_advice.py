"""What to do about errors whose own text does not say so."""

from tasks.inference.trace_rows.failures import add_advice


def test_an_image_for_a_renderer_of_text() -> None:
    said = "model call answered 502: Qwen3Renderer does not support process_multimodal=False"
    assert add_advice(said).startswith(
        f"{said}; the environment sends images, and the renderer of this model takes text"
    )


def test_other_messages_stay_as_they_are() -> None:
    assert add_advice("KeyError: 'answer'") == "KeyError: 'answer'"
