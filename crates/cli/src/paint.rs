//! Colour, for people at a terminal.

/// Paints or leaves plain.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Paint {
    /// Whether to.
    pub(crate) on: bool,
}

impl Paint {
    /// Something stands in the way, or is broken.
    pub(crate) fn bad(self, text: &str) -> String {
        self.with("31", text)
    }

    /// All is well.
    pub(crate) fn good(self, text: &str) -> String {
        self.with("32", text)
    }

    /// Worth a look.
    pub(crate) fn notable(self, text: &str) -> String {
        self.with("33", text)
    }

    /// Less important.
    pub(crate) fn faint(self, text: &str) -> String {
        self.with("2", text)
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.on { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}
