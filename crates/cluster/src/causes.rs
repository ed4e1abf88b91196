//! Errors in one line.

use std::error::Error;

/// An error with all that caused it.
#[must_use]
pub fn with_causes(error: &dyn Error) -> String {
    let texts: Vec<String> = causes(error).map(ToString::to_string).collect();
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
