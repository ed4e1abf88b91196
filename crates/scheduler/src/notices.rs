//! What users are told by Kubernetes Events, where kube-scheduler's own do not say it: which GPUs a pod got and why, what
//! its quota leaves, and that a binding came to nothing.
//!
//! Telling must never hold up a bind: notices go through a queue that drops what does not fit, and [`Series`] decides
//! without a clock or a network what is worth a write.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use tessera_cluster::{Client, PodNotice};
use tokio::sync::mpsc;

use crate::state::Timestamp;

/// Notices that wait to be written, at most.
const QUEUE: usize = 256;

/// How long a write may take.
const WRITE_WITHIN: Duration = Duration::from_secs(3);

/// Who tells.
const REPORTER: &str = "tessera-scheduler";

/// Writes at once after a quiet time, and per second after that. A burst of binds tells of the first ones only.
const BURST: f64 = 25.0;
const PER_SECOND: f64 = 5.0;

/// Writes kept for warnings.
const RESERVED: f64 = 5.0;

/// The same again is counted, and told no more often than this.
const REPEAT_AFTER: Duration = Duration::from_secs(60);

/// Series remembered at most, and for how long after they were last heard of.
const MOST_SERIES: usize = 4096;
const REMEMBERED: Duration = Duration::from_secs(3600);

/// What a notice is about: the event's reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoticeReason {
    /// The GPUs of a pod, and why these.
    GpusChosen,
    /// The namespace has had its share.
    QuotaExceeded,
    /// A binding was not taken: the GPUs are free again, or kept until it is known.
    BindingFailed,
}

impl fmt::Display for NoticeReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Where notices are handed in.
#[derive(Clone, Debug, Default)]
pub struct Notices(Option<mpsc::Sender<(Timestamp, PodNotice)>>);

impl Notices {
    /// Writes notices to the API server in a task of its own, which ends with the last copy of this.
    #[must_use]
    pub fn start(client: Client) -> Self {
        let (sender, mut receiver) = mpsc::channel::<(Timestamp, PodNotice)>(QUEUE);
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

    /// Whether anybody listens.
    #[must_use]
    pub fn are_on(&self) -> bool {
        self.0.is_some()
    }

    /// Tells something, unless too much waits already.
    pub fn tell(&self, now: Timestamp, event: PodNotice) {
        if let Some(sender) = &self.0 {
            let _dropped = sender.try_send((now, event));
        }
    }
}

async fn carry_out(client: &Client, event: &PodNotice, write: Write) {
    let outcome = match &write {
        Write::Create { name } => {
            tokio::time::timeout(WRITE_WITHIN, event.create(client, name, REPORTER)).await
        }
        Write::Repeat { name, count } => {
            tokio::time::timeout(WRITE_WITHIN, event.repeat(client, name, *count)).await
        }
    };
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, pod = event.pod, "an event was not written"),
        Err(_) => tracing::debug!(pod = event.pod, "an event was not written in time"),
    }
}

/// What is to be written for a notice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// An event of this name.
    Create {
        /// Unique in its namespace.
        name: String,
    },
    /// The event of this name has happened so often.
    Repeat {
        /// As it was created.
        name: String,
        /// In all.
        count: u32,
    },
}

/// Equal notices about one pod are one event with a count.
#[derive(Debug)]
pub struct Series {
    known: HashMap<(String, String, String), Told>,
    /// Writes that may be made now.
    tokens: f64,
    /// When they were counted.
    counted: Duration,
}

#[derive(Debug)]
struct Told {
    name: String,
    count: u32,
    /// When it was last written.
    written: Duration,
    /// When it was last heard of.
    heard: Duration,
}

impl Default for Series {
    fn default() -> Self {
        Self { known: HashMap::new(), tokens: BURST, counted: Duration::ZERO }
    }
}

impl Series {
    /// Takes a notice in; what is to be written, if anything.
    pub fn take(&mut self, now: Timestamp, event: &PodNotice) -> Option<Write> {
        self.forget(now.steady);
        let passed = now.steady.saturating_sub(self.counted).as_secs_f64();
        self.tokens = (self.tokens + passed * PER_SECOND).min(BURST);
        self.counted = self.counted.max(now.steady);
        let key = (event.uid.clone(), event.reason.clone(), event.message.clone());
        if let Some(told) = self.known.get_mut(&key) {
            told.count = told.count.saturating_add(1);
            told.heard = now.steady;
            if now.steady.saturating_sub(told.written) < REPEAT_AFTER || self.tokens < 1.0 {
                return None;
            }
            self.tokens -= 1.0;
            told.written = now.steady;
            return Some(Write::Repeat { name: told.name.clone(), count: told.count });
        }
        let kept = if event.is_warning { 0.0 } else { RESERVED };
        if self.tokens < 1.0 + kept {
            return None;
        }
        self.tokens -= 1.0;
        // As client-go names them: the time keeps them apart.
        let name = format!("{}.{:x}", event.pod, now.unix_nanos);
        let told = Told { name: name.clone(), count: 1, written: now.steady, heard: now.steady };
        self.known.insert(key, told);
        Some(Write::Create { name })
    }

    fn forget(&mut self, now: Duration) {
        if self.known.len() >= MOST_SERIES {
            self.known.retain(|_, told| now.saturating_sub(told.heard) < REMEMBERED);
        }
        if self.known.len() >= MOST_SERIES {
            self.known.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp { steady: Duration::from_secs(seconds), unix_nanos: u128::from(seconds) << 4 }
    }

    fn event(pod: &str) -> PodNotice {
        PodNotice {
            namespace: "team".into(),
            pod: pod.into(),
            uid: format!("uid-{pod}"),
            is_warning: false,
            reason: "GpusChosen".into(),
            message: "GPU 1".into(),
        }
    }

    #[test]
    fn the_same_again_is_counted_and_told_once_a_minute() {
        let mut series = Series::default();
        assert_eq!(series.take(at(1), &event("a")), Some(Write::Create { name: "a.10".into() }));
        for second in 2..61 {
            assert_eq!(series.take(at(second), &event("a")), None);
        }
        let repeated = Write::Repeat { name: "a.10".into(), count: 61 };
        assert_eq!(series.take(at(61), &event("a")), Some(repeated));
        assert_eq!(series.take(at(62), &event("b")), Some(Write::Create { name: "b.3e0".into() }));
    }

    #[test]
    fn a_flood_is_cut_off_and_goes_on_at_its_pace() {
        let mut series = Series::default();
        let mut written = |second| {
            let events = (0..100).map(|number| event(&format!("{second}-{number}")));
            events.filter(|event| series.take(at(second), event).is_some()).count()
        };
        assert_eq!(written(0), 20);
        assert_eq!(written(1), 5);
        assert_eq!(written(3), 10);
        assert_eq!(written(1000), 20);
        let warning = PodNotice { is_warning: true, ..event("warned") };
        assert!(series.take(at(1000), &warning).is_some(), "a warning still gets through");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut series = Series::default();
        for number in 0..20_000 {
            series.take(at(number), &event(&number.to_string()));
            assert!(series.known.len() <= MOST_SERIES);
        }
    }
}
