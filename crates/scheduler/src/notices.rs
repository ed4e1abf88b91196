//! Kubernetes Events for users: which GPUs a pod got and why, the usage of its quota, and failed
//! bindings.
//!
//! A bind never waits for an event. Notices go through a bounded queue that drops what does not
//! fit, and [`Series`] decides without a clock or a network what is worth a write.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use tessera_cluster::{Client, Notice};
use tokio::sync::mpsc;

use crate::state::Timestamp;

/// Notices that may wait to be written.
const QUEUE_CAPACITY: usize = 256;

/// Timeout of a write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(3);

/// The component that reports the events.
const REPORTER: &str = "tessera-scheduler";

/// Token bucket for writes: 25 at once and 5 per second. A burst of binds reports only the first
/// ones.
const BURST: f64 = 25.0;
const PER_SECOND: f64 = 5.0;

/// Tokens reserved for warnings.
const RESERVED: f64 = 5.0;

/// Minimum interval between two writes of the same event.
const REPEAT_INTERVAL: Duration = Duration::from_secs(60);

/// Number of series kept; a series is dropped first when it was not repeated for
/// [`SERIES_LIFETIME`].
const MAX_SERIES: usize = 4096;
const SERIES_LIFETIME: Duration = Duration::from_secs(3600);

/// The reason of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoticeReason {
    /// The pod was bound; the message names its GPUs and the reason for the choice.
    GpusChosen,
    /// The quota of the namespace forbids the pod on every suitable node.
    QuotaExceeded,
    /// The API server refused a binding or did not answer.
    BindingFailed,
    /// Pods of a gang are missing, or were not bound in time; the message names them.
    GangIncomplete,
    /// The pod is evicted, because pods with a better claim need its GPUs; the message names them.
    EvictedForGpus,
    /// The GPUs of a claim were replaced; the message names the new ones and the reason.
    GpusReplaced,
    /// A claim cannot be served on the chosen node; the message says why.
    ClaimRefused,
    /// A pod waits for devices of the claim; the message says what kube-scheduler reports of the pod.
    ClaimWaits,
    /// Other pods are evicted so that this one gets GPUs, or the evictions made no room in time.
    MakingRoom,
}

impl NoticeReason {
    /// Returns whether events for this reason are warnings.
    #[must_use]
    pub fn is_warning(self) -> bool {
        !matches!(self, Self::GpusChosen | Self::GpusReplaced)
    }
}

impl fmt::Display for NoticeReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The queue of notices; the default value drops all of them.
#[derive(Clone, Debug, Default)]
pub struct Notices(Option<mpsc::Sender<(Timestamp, Notice)>>);

impl Notices {
    /// Starts a task that writes notices to the API server. It ends when the last clone is dropped.
    #[must_use]
    pub fn start(client: Client) -> Self {
        let (sender, mut receiver) = mpsc::channel::<(Timestamp, Notice)>(QUEUE_CAPACITY);
        tokio::spawn(async move {
            let mut series = Series::default();
            while let Some((now, event)) = receiver.recv().await {
                if let Some(write) = series.take(now, &event) {
                    carry_out(&client, &event, write).await;
                }
            }
        });
        Self(Some(sender))
    }

    /// Returns whether notices are written.
    #[must_use]
    pub fn are_on(&self) -> bool {
        self.0.is_some()
    }

    /// Queues a notice, or drops it if the queue is full.
    pub fn send(&self, now: Timestamp, event: Notice) {
        if let Some(sender) = &self.0 {
            let _dropped = sender.try_send((now, event));
        }
    }
}

async fn carry_out(client: &Client, event: &Notice, write: EventWrite) {
    let outcome = match &write {
        EventWrite::Create { name } => {
            tokio::time::timeout(WRITE_TIMEOUT, event.create(client, name, REPORTER)).await
        }
        EventWrite::Repeat { name, count } => {
            tokio::time::timeout(WRITE_TIMEOUT, event.repeat(client, name, *count)).await
        }
    };
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::debug!(%error, object = event.name, "cannot write an event; it is dropped")
        }
        Err(_) => tracing::debug!(object = event.name, "writing an event timed out; it is dropped"),
    }
}

/// The write that a notice causes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventWrite {
    /// Creates an event.
    Create {
        /// Name of the event, unique in its namespace.
        name: String,
    },
    /// Updates the count of an event.
    Repeat {
        /// Name of the event.
        name: String,
        /// Number of occurrences.
        count: u32,
    },
}

/// Merges equal notices about one object into one event with a count, and limits the rate of writes.
#[derive(Debug)]
pub struct Series {
    known: HashMap<(String, String, String), SeriesEntry>,
    /// Writes available now.
    tokens: f64,
    /// Time of the last refill.
    counted: Duration,
}

#[derive(Debug)]
struct SeriesEntry {
    name: String,
    count: u32,
    /// Time of the last write.
    written: Duration,
    /// Time of the last notice.
    heard: Duration,
}

impl Default for Series {
    fn default() -> Self {
        Self { known: HashMap::new(), tokens: BURST, counted: Duration::ZERO }
    }
}

impl Series {
    /// Adds a notice. Returns the write that it causes, if any.
    pub fn take(&mut self, now: Timestamp, event: &Notice) -> Option<EventWrite> {
        self.forget(now.steady);
        let passed = now.steady.saturating_sub(self.counted).as_secs_f64();
        self.tokens = (self.tokens + passed * PER_SECOND).min(BURST);
        self.counted = self.counted.max(now.steady);
        let key = (event.uid.clone(), event.reason.clone(), event.message.clone());
        if let Some(entry) = self.known.get_mut(&key) {
            entry.count = entry.count.saturating_add(1);
            entry.heard = now.steady;
            if now.steady.saturating_sub(entry.written) < REPEAT_INTERVAL || self.tokens < 1.0 {
                return None;
            }
            self.tokens -= 1.0;
            entry.written = now.steady;
            return Some(EventWrite::Repeat { name: entry.name.clone(), count: entry.count });
        }
        let kept = if event.is_warning { 0.0 } else { RESERVED };
        if self.tokens < 1.0 + kept {
            return None;
        }
        self.tokens -= 1.0;
        // client-go names events in the same way; the time makes the name unique.
        let name = format!("{}.{:x}", event.name, now.unix_nanos);
        let entry = SeriesEntry { name: name.clone(), count: 1, written: now.steady, heard: now.steady };
        self.known.insert(key, entry);
        Some(EventWrite::Create { name })
    }

    fn forget(&mut self, now: Duration) {
        if self.known.len() >= MAX_SERIES {
            self.known.retain(|_, entry| now.saturating_sub(entry.heard) < SERIES_LIFETIME);
        }
        if self.known.len() >= MAX_SERIES {
            self.known.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use tessera_cluster::NoticeKind;

    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp { steady: Duration::from_secs(seconds), unix_nanos: u128::from(seconds) << 4 }
    }

    fn event(pod: &str) -> Notice {
        Notice {
            kind: NoticeKind::Pod,
            namespace: "team".into(),
            name: pod.into(),
            uid: format!("uid-{pod}"),
            is_warning: false,
            reason: "GpusChosen".into(),
            message: "GPU 1".into(),
        }
    }

    #[test]
    fn repeated_notices_are_counted_and_written_once_a_minute() {
        let mut series = Series::default();
        assert_eq!(series.take(at(1), &event("a")), Some(EventWrite::Create { name: "a.10".into() }));
        for second in 2..61 {
            assert_eq!(series.take(at(second), &event("a")), None);
        }
        let repeated = EventWrite::Repeat { name: "a.10".into(), count: 61 };
        assert_eq!(series.take(at(61), &event("a")), Some(repeated));
        assert_eq!(series.take(at(62), &event("b")), Some(EventWrite::Create { name: "b.3e0".into() }));
    }

    #[test]
    fn a_flood_is_limited_to_the_rate() {
        let mut series = Series::default();
        let mut written = |second| {
            let events = (0..100).map(|number| event(&format!("{second}-{number}")));
            events.filter(|event| series.take(at(second), event).is_some()).count()
        };
        assert_eq!(written(0), 20);
        assert_eq!(written(1), 5);
        assert_eq!(written(3), 10);
        assert_eq!(written(1000), 20);
        let warning = Notice { is_warning: true, ..event("warned") };
        assert!(series.take(at(1000), &warning).is_some(), "a warning uses the reserved tokens");
    }

    #[test]
    fn the_number_of_series_is_bounded() {
        let mut series = Series::default();
        for number in 0..20_000 {
            series.take(at(number), &event(&number.to_string()));
            assert!(series.known.len() <= MAX_SERIES);
        }
    }
}
