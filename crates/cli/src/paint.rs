//! Colours for terminals.

/// Adds colour to text if it is enabled.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Paint {
    pub(crate) on: bool,
}

impl Paint {
    /// Marks an error or a rejection in red.
    pub(crate) fn bad(self, text: &str) -> String {
        self.with("31", text)
    }

    /// Marks a success in green.
    pub(crate) fn good(self, text: &str) -> String {
        self.with("32", text)
    }

    /// Marks something notable in yellow.
    pub(crate) fn notable(self, text: &str) -> String {
        self.with("33", text)
    }

    /// Dims less important text.
    pub(crate) fn faint(self, text: &str) -> String {
        self.with("2", text)
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.on { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}
