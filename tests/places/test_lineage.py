"""The run's line of attempts, by which a copy that turns up late is taken or not."""

from pathlib import Path

from rankup.places.lease import Lineage


def test_line_of_attempts_goes_through_what_the_run_went_on_from_alone(tmp_path: Path) -> None:
    lineage = Lineage.new("first", "start")
    assert (lineage.attempts, lineage.begun_by) == ([], "first")
    lineage.go_on("first", step=0, writer=None)
    lineage.go_on("second", step=8, writer="first")
    lineage.write(tmp_path)
    again = Lineage.read(tmp_path)
    assert again == lineage
    assert again.has(8, "first")
    assert not again.has(9, "first"), "the run went on without it"
    assert again.has(99, "second")
    assert not again.has(8, "third")
    again.go_on("third", step=4, writer="first")  # what the second did is done again
    assert (again.attempts, again.number) == ([["first", 0], ["third", 4]], 3)
    assert again.has(4, "first")
    assert not again.has(8, "first")
    assert not again.has(9, "second")
    again.go_on("fourth", step=6, writer="of a line that nobody knows")
    assert again.has(6, "of a line that nobody knows")
    again.go_on("fifth", step=0, writer=None)
    assert again.attempts == [["fifth", 0]]


def test_line_of_attempts_says_what_came_of_what() -> None:
    lineage, other = Lineage("run", "", "", []), Lineage("run", "", "", [])
    lineage.go_on("first", step=0, writer=None)
    assert lineage.goes_on_from(other), "nobody knows its attempts"
    other.go_on("first", step=0, writer=None)
    lineage.go_on("second", step=8, writer="first")
    assert lineage.goes_on_from(other)
    other.go_on("elsewhere", step=8, writer="first")
    assert not lineage.goes_on_from(other)
    assert not lineage.goes_on_from(Lineage("another", "", "", []))
