from qerl.bench.rollout import compare


def test_both_contenders_draw_about_the_same_amount() -> None:
    ours, theirs = compare("toy", 8, 8, 40, "cpu", say=lambda message: None)
    assert (ours["contender"], theirs["contender"]) == ("qerl", "transformers")
    assert 0.8 < ours["tokens"] / theirs["tokens"] < 1.25
    assert ours["tokens"] < 8 * 8 * 40  # lengths are mixed
