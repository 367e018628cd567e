"""The training curve read from sparse metrics files."""

from drafttrain.plots import CurvePoint
from drafttrain.validation.curve import read_curve


def write(logs, version, text):
    folder = logs / f"version_{version}"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(text)


def test_a_row_without_a_token_count_takes_the_last_one(tmp_path):
    write(tmp_path, 0, "held_out/tau,step,tokens_seen,train/loss\n,1,100,5.0\n,2,200,4.5\n1.25,2,,\n,3,300,\n")
    points = [CurvePoint(100, 5.0), CurvePoint(200, 4.5), CurvePoint(200, None, 1.25)]
    assert read_curve(tmp_path) == points == read_curve(tmp_path / "version_0" / "metrics.csv")


def test_starts_are_joined_in_order_and_steps_lost_in_a_crash_are_dropped(tmp_path):
    write(tmp_path, 2, "tokens_seen,train/loss\n100,5.0\n200,4.0\n300,9.0\n")
    write(tmp_path, 10, "tokens_seen,train/loss\n300,3.0\n400,2.0\n")
    assert read_curve(tmp_path) == [CurvePoint(100, 5.0), CurvePoint(200, 4.0), CurvePoint(300, 3.0), CurvePoint(400, 2.0)]


def test_the_loss_logged_at_the_stop_stays_where_going_on_measured_tau_first(tmp_path):
    write(tmp_path, 0, "tokens_seen,train/loss\n100,5.0\n")
    write(tmp_path, 1, "held_out/tau,tokens_seen,train/loss\n1.2,100,\n,200,4.0\n")
    assert read_curve(tmp_path) == [CurvePoint(100, 5.0), CurvePoint(100, None, 1.2), CurvePoint(200, 4.0)]


def test_no_folder_no_columns_or_no_rows_give_no_curve(tmp_path):
    assert read_curve(tmp_path / "none") == []
    write(tmp_path, 0, "step,lr\n1,0.1\n")
    write(tmp_path, 1, "")
    assert read_curve(tmp_path) == []


def test_what_a_drafter_reached_before_the_first_token_is_its_first_point(tmp_path):
    write(tmp_path, 0, "held_out/tau,tokens_seen,train/loss\n,,6.0\n1.3,0,\n,100,5.0\n")
    assert read_curve(tmp_path) == [CurvePoint(0, None, 1.3), CurvePoint(100, 5.0)]
