from qerl.bench.quantize import compare


def test_both_contenders_write_the_same_amount() -> None:
    ours, theirs = compare("toy", None, repeats=1, say=lambda message: None)
    assert (ours["contender"], theirs["contender"]) == ("qerl", "llm-compressor")
    assert ours["seconds"] > 0
    assert ours["output_gb"] == theirs["output_gb"]
    assert ours["peak_gb"] < theirs["peak_gb"]
