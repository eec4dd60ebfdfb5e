"""A run that would run nothing is refused, instead of passing."""

from __future__ import annotations

import pytest

import tests.sim.connector.run
import tests.sim.run


@pytest.mark.parametrize("main", [tests.sim.run.main, tests.sim.connector.run.main])
@pytest.mark.parametrize("arguments", [["--seed", "-1"], ["--seed", "one"], ["COUNT", "0"]])
def test_numbers_that_make_no_run_are_wrong_usage(
    main: object, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(main)
    count = "--worlds" if main is tests.sim.run.main else "--histories"
    monkeypatch.setattr("sys.argv", ["run", *[argument.replace("COUNT", count) for argument in arguments]])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "is not a whole number from" in capsys.readouterr().err
