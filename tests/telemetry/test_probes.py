"""How sensors are probed, read and given up, whatever they measure."""

import time

import pytest

from telemetry.providers.base import (
    Probe,
    Probes,
    SensorUnavailableError,
    Tier,
    Verdict,
    all_unavailable,
    read_all,
    tier_for,
)
from telemetry.records import Sensor

A, B = Sensor("x.a", "count", "a test"), Sensor("x.b", "count", "a test")


def probes(*given, **options):
    options.setdefault("classify", lambda error: (Verdict.GAP, str(error)))
    return Probes("x", given, errors=(OSError,), **options)


def failing(error):
    def read():
        raise error

    return read


@pytest.mark.parametrize(
    ("cost_us", "wanted", "tier"),
    [
        (900, Tier.FAST, Tier.FAST),
        (1_100, Tier.FAST, Tier.SLOW),
        (1_100, Tier.SLOW, Tier.SLOW),
        (5_100, Tier.FAST, Tier.MANUAL),
        (5_100, Tier.SLOW, Tier.MANUAL),
        (90_000, Tier.EDGES, Tier.EDGES),
    ],
)
def test_cost_decides_the_tier(cost_us, wanted, tier):
    assert tier_for(cost_us, wanted) is tier


def test_the_cost_of_a_read_is_measured_when_it_is_opened():
    provider = probes(Probe((A,), Tier.FAST, lambda: (time.sleep(0.002), 7)[1:]))

    (sensor,) = provider.sensors()
    assert sensor.cost_us >= 2_000
    assert sensor.tier in ("slow", "manual")  # the latter on a very busy machine
    assert read_all(provider, [Tier.SLOW, Tier.MANUAL]) == {"x.a": 7}


def test_a_read_of_several_sensors_gives_one_value_for_each():
    provider = probes(Probe((A,), Tier.FAST, lambda: (1,)), Probe((B,), Tier.EDGES, lambda: (2,)))

    assert provider.names(Tier.FAST) == ("x.a",)
    assert read_all(provider, [Tier.FAST, Tier.EDGES]) == {"x.a": 1, "x.b": 2}
    assert read_all(provider, [Tier.SLOW]) == {}


def test_a_sensor_that_is_off_keeps_its_place():
    works = True

    def read():
        if not works:
            raise SensorUnavailableError("gone")
        return (1,)

    provider = probes(Probe((A,), Tier.FAST, read), Probe((B,), Tier.FAST, lambda: (2,)))
    works = False

    assert provider.read(Tier.FAST) == (None, 2)
    assert provider.names(Tier.FAST) == ("x.a", "x.b")
    assert provider.sensors()[0].reason == "gone"


def test_an_error_that_is_not_known_is_a_bug_and_comes_out():
    with pytest.raises(ZeroDivisionError):
        probes(Probe((A,), Tier.FAST, lambda: (1 // 0,)))


def test_a_failing_sensor_is_off_from_the_start_with_its_reason():
    provider = probes(Probe((A,), Tier.FAST, failing(OSError("no such file"))))

    assert "no such file" in provider.sensors()[0].reason
    assert not provider.sensors()[0].available


def test_a_sensor_that_fails_again_after_a_reopening_is_off():
    opened = []

    def read():
        if len(opened) == 0:
            raise OSError("closed")
        raise OSError("still closed")

    provider = probes(
        Probe((A,), Tier.FAST, read),
        classify=lambda error: (Verdict.REOPEN, str(error)),
        reopen=lambda: opened.append(1),
    )

    assert opened == [1]
    assert provider.sensors()[0].reason == "still closed"


def test_closing_twice_lets_go_once():
    closed = []
    provider = probes(on_close=lambda: closed.append(1))
    provider.close()
    provider.close()

    assert closed == [1]


def test_a_provider_that_is_not_to_be_had_lists_its_sensors_with_the_reason():
    provider = all_unavailable("x", (A, B), "no driver")

    assert [(s.name, s.reason) for s in provider.sensors()] == [
        ("x.a", "no driver"),
        ("x.b", "no driver"),
    ]
    assert provider.read(Tier.FAST) == ()
    assert provider.lost is None
