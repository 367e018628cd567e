"""The training curve read from a sparse metrics file."""

from drafttrain.plots import CurvePoint
from drafttrain.validation.curve import read_curve


def test_sparse_rows_take_the_last_token_count(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,train/tokens,train/loss,held_out/tau\n1,100,5.0,\n2,200,4.5,\n2,,,1.25\n3,300,,\n")
    assert read_curve(path) == [CurvePoint(100, 5.0), CurvePoint(200, 4.5), CurvePoint(200, None, 1.25)]


def test_a_missing_file_or_missing_columns_give_no_curve(tmp_path):
    assert read_curve(tmp_path / "none.csv") == []
    other = tmp_path / "other.csv"
    other.write_text("step,lr\n1,0.1\n")
    assert read_curve(other) == []
