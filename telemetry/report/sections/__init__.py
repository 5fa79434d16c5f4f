"""The parts of a report, one file each: a pure function from an `Analysis` to a `Section`."""
