"""What /metrics shows of the relay."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

newest_version = Gauge("stretto_weightsync_newest_version_number", "Newest READY policy version.")
newest_epoch = Gauge("stretto_weightsync_newest_trainer_epoch_number", "Trainer epoch of the newest READY version.")
published = Counter("stretto_weightsync_publishes_total", "Publishes by outcome.", ["outcome"])
published_bytes = Counter("stretto_weightsync_published_bytes_total", "Bytes of versions that became READY.")
publish_seconds = Histogram("stretto_weightsync_publish_seconds", "From PreparePublish to READY.", buckets=_SECONDS)
verify_seconds = Histogram("stretto_weightsync_verify_seconds", "Hashing a slot before it becomes READY.", buckets=_SECONDS)
leases = Gauge("stretto_weightsync_leases_count", "Leases held now.")
lapsed = Counter("stretto_weightsync_leases_lapsed_total", "Leases that ended before they were released.")
fetched = Counter("stretto_weightsync_fetches_total", "Ended fetches by outcome.", ["backend", "outcome"])
sent_bytes = Counter("stretto_weightsync_sent_bytes_total", "Bytes streamed to readers (shm moves none).")
readers = Gauge("stretto_weightsync_readers_count", "Readers in the table.")
slots = Gauge("stretto_weightsync_slots_count", "Slots allocated.")
resident_bytes = Gauge("stretto_weightsync_resident_bytes", "Bytes of all slots.")
