//! Formats errors with their causes, and limits how often a repeated failure is logged.

use std::error::Error;

/// Returns the error and all its causes in one line. A cause that the layer above already quotes is
/// left out.
#[must_use]
pub fn with_causes(error: &dyn Error) -> String {
    let mut texts: Vec<String> = causes(error).map(ToString::to_string).collect();
    texts.dedup_by(|cause, above| above.contains(&*cause));
    texts.join(": ")
}

/// Returns the root cause of `error`. The layers above only say that a request failed.
pub(crate) fn innermost(error: &dyn Error) -> String {
    causes(error).last().map(ToString::to_string).unwrap_or_default()
}

fn causes<'a>(error: &'a dyn Error) -> impl Iterator<Item = &'a dyn Error> {
    std::iter::successors(Some(error), |error: &&'a dyn Error| {
        let error: &'a dyn Error = *error;
        error.source().map(|cause| cause as &dyn Error)
    })
}

/// Decides whether a failure that may repeat is worth a log line: when it starts and when its
/// reason changes, but not on every retry.
#[derive(Debug, Default)]
pub struct FailureLog(Option<String>);

impl FailureLog {
    /// Records a failure. Returns true if its reason differs from the last one, so that it should
    /// be logged.
    pub fn record(&mut self, reason: &str) -> bool {
        let is_new = self.0.as_deref() != Some(reason);
        if is_new {
            self.0 = Some(reason.to_owned());
        }
        is_new
    }

    /// Records a success. Returns true if it ends a failure.
    pub fn clear(&mut self) -> bool {
        self.0.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Layer {
        text: &'static str,
        source: Option<Box<Self>>,
    }

    #[test]
    fn leaves_out_a_cause_that_the_layer_above_quotes() {
        let refused = Layer { text: "connection refused", source: None };
        let service = Layer { text: "service: connection refused", source: Some(Box::new(refused)) };
        let all = Layer { text: "no pods", source: Some(Box::new(service)) };
        assert_eq!(with_causes(&all), "no pods: service: connection refused");
        assert_eq!(innermost(&all), "connection refused");
    }

    #[test]
    fn reports_a_failure_when_it_starts_changes_or_returns() {
        let mut failure = FailureLog::default();
        assert!(!failure.clear());
        assert!(failure.record("refused") && !failure.record("refused") && failure.record("forbidden"));
        assert!(failure.clear());
        assert!(failure.record("forbidden"));
    }
}
