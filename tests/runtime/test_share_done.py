"""What is printed without a terminal."""

from adaptive_span_jax.runtime import terminal


def test_long_work_prints_a_line_now_and_then(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    with terminal.share_done("evaluating dev") as show:
        show(0.0)
        for second, share in ((10, 0.1), (29, 0.2), (84, 0.4), (100, 0.5), (115, 0.5), (209, 0.995), (210, 1.0)):
            now = 100.0 + second
            show(share)
    assert capsys.readouterr().out.splitlines() == [
        "evaluating dev …",
        "evaluating dev: 40 %, 2.1 min left",
        "evaluating dev: 50 %, 115 s left",
        "evaluating dev: 99 %, 1 s left",
    ]
