from qerl.bench.formats import measure


def test_the_search_helps_on_every_kind_of_weights() -> None:
    rows = list(measure(rows=64))
    assert len(rows) == 9
    for row in rows:
        assert row.mse < row.rtn
    nvfp4 = {row.weights: row for row in rows if row.format == "nvfp4"}
    assert nvfp4["gaussian"].gain > 0.1
