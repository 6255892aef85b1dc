"""What Prometheus is told: the same as from its own histograms, which take longer to count."""

import math

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from specact.server.telemetry import Telemetry
from specact.wire.messages import Reply

BOUNDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@given(st.lists(st.one_of(st.sampled_from([0.0, *BOUNDS]), st.floats(0.0, 2000.0)), max_size=20))
def test_a_histogram_says_what_prometheus_own_says(values: list[float]) -> None:
    telemetry, theirs = Telemetry("ball"), prometheus_client.Histogram("x", "Times.", buckets=BOUNDS, registry=None)
    robot = telemetry.connected("arm")
    for value in values:
        telemetry.record_reply("infer", Reply(1, 0.0, 0.0, value, 1, bytearray()), robot)
        theirs.observe(value)
    expected = [sample for metric in theirs.collect() for sample in metric.samples]
    ours = [metric for metric in telemetry.collect() if metric.name == "specact_total_milliseconds"]
    found = {
        tuple(sample.labels.values()) or sample.name.rpartition("_")[2]: sample.value for sample in ours[0].samples
    }
    assert found == pytest.approx({
        tuple(sample.labels.values()) or sample.name.rpartition("_")[2]: sample.value for sample in expected
        if sample.name != "x_created"
    })  # fmt: skip


def test_every_metric_has_its_name_its_labels_and_its_value() -> None:
    telemetry = Telemetry("ball")
    robot = telemetry.connected("arm")
    for batch in (1, 3):
        telemetry.record_reply("infer", Reply(1, 0.1, 2.0, 5.5, batch, bytearray()), robot)
    telemetry.record_error("other", "bad_message", robot)
    registry = CollectorRegistry()
    registry.register(telemetry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("specact_requests_total", kind="infer", outcome="ok") == 2
    assert value("specact_requests_total", kind="other", outcome="bad_message") == 1
    assert value("specact_queue_milliseconds_bucket", le="0.1") == value("specact_total_milliseconds_count") == 2
    assert value("specact_total_milliseconds_bucket", le="5.0") == 0
    assert value("specact_total_milliseconds_bucket", le="+Inf") == 2
    assert math.isclose(value("specact_target_milliseconds_sum") or 0.0, 4.0)
    assert (value("specact_batch_size_bucket", le="2.0"), value("specact_batch_size_bucket", le="4.0")) == (1, 2)
    assert (value("specact_robots"), value("specact_queue")) == (1, 0)
    assert telemetry.status(0, True)["outcomes"] == {"ok": 2, "bad_message": 1}
