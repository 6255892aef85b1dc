"""What Prometheus is told: the same as from its own histograms, which take longer to count."""

import json

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry as Registry

from specact.server.telemetry import Telemetry
from specact.wire.messages import Reply

BOUNDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@given(st.lists(st.one_of(st.sampled_from([0.0, *BOUNDS]), st.floats(0.0, 2000.0)), max_size=20))
def test_a_histogram_says_what_prometheus_own_says(values: list[float]) -> None:
    name, telemetry, ours, theirs = "specact_total_milliseconds", Telemetry("ball"), Registry(), Registry()
    histogram = prometheus_client.Histogram(name, "Times.", buckets=BOUNDS, registry=theirs)
    robot = telemetry.connected("arm")
    for value in values:
        telemetry.record_reply("infer", Reply(1, 0.0, 0.0, value, 1, bytearray()), robot)
        histogram.observe(value)
    ours.register(telemetry)
    samples = [sample for metric in theirs.collect() for sample in metric.samples if "created" not in sample.name]
    numbers = [ours.get_sample_value(sample.name, sample.labels) for sample in samples]
    assert numbers == pytest.approx([sample.value for sample in samples])


def test_every_metric_has_its_name_its_labels_and_its_value() -> None:
    telemetry, registry = Telemetry("ball", range(3)), Registry()
    robot = telemetry.connected("arm")
    for batch in (1, 3):
        telemetry.record_reply("infer", Reply(1, 0.1, 2.0, 5.5, batch, bytearray()), robot)
    telemetry.record_error("other", "bad_message", robot)
    registry.register(telemetry)
    value = registry.get_sample_value
    assert value("specact_requests_total", {"kind": "infer", "outcome": "ok"}) == 2
    assert value("specact_requests_total", {"kind": "other", "outcome": "bad_message"}) == 1
    assert value("specact_queue_milliseconds_bucket", {"le": "0.1"}) == value("specact_total_milliseconds_count") == 2
    assert [value("specact_batch_size_bucket", {"le": bound}) for bound in ("2.0", "4.0")] == [1, 2]
    assert value("specact_target_milliseconds_sum") == pytest.approx(4.0)
    assert (value("specact_robots"), value("specact_queue")) == (1, 3)
    assert json.loads(telemetry.status(True))["outcomes"] == {"ok": 2, "bad_message": 1}
