//! Errors in one line, and troubles that are told once.

use std::error::Error;

/// An error with all that caused it. Layers that repeat what is below them are not told twice.
#[must_use]
pub fn with_causes(error: &dyn Error) -> String {
    let mut texts: Vec<String> = causes(error).map(ToString::to_string).collect();
    texts.dedup_by(|cause, above| above.contains(&*cause));
    texts.join(": ")
}

/// The cause of all: the layers above it only say that a request failed.
pub(crate) fn innermost(error: &dyn Error) -> String {
    causes(error).last().map(ToString::to_string).unwrap_or_default()
}

fn causes<'a>(error: &'a dyn Error) -> impl Iterator<Item = &'a dyn Error> {
    std::iter::successors(Some(error), |error: &&'a dyn Error| {
        let error: &'a dyn Error = *error;
        error.source().map(|cause| cause as &dyn Error)
    })
}

/// A trouble that may last: worth a line in the log when it comes and when its reason is another one, not at every try.
#[derive(Debug, Default)]
pub struct Trouble(Option<String>);

impl Trouble {
    /// Takes note of it. Returns whether it is news.
    pub fn is_news(&mut self, why: &str) -> bool {
        let is_news = self.0.as_deref() != Some(why);
        if is_news {
            self.0 = Some(why.to_owned());
        }
        is_news
    }

    /// It works again. Returns whether there was any.
    pub fn is_over(&mut self) -> bool {
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
    fn what_layers_repeat_is_told_once() {
        let refused = Layer { text: "connection refused", source: None };
        let service = Layer { text: "service: connection refused", source: Some(Box::new(refused)) };
        let all = Layer { text: "no pods", source: Some(Box::new(service)) };
        assert_eq!(with_causes(&all), "no pods: service: connection refused");
        assert_eq!(innermost(&all), "connection refused");
    }

    #[test]
    fn a_trouble_is_news_when_it_comes_changes_or_comes_back() {
        let mut trouble = Trouble::default();
        assert!(!trouble.is_over());
        assert!(trouble.is_news("refused") && !trouble.is_news("refused") && trouble.is_news("forbidden"));
        assert!(trouble.is_over());
        assert!(trouble.is_news("forbidden"));
    }
}
