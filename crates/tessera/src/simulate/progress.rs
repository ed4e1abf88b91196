//! A progress bar on standard error.

use std::io::{IsTerminal as _, Write as _};

/// The progress of a long computation. Prints nothing unless standard error is a terminal.
#[derive(Debug)]
pub(super) struct Progress {
    total: usize,
    done: usize,
    shown: bool,
}

const WIDTH: usize = 40;

impl Progress {
    pub(super) fn of(total: usize) -> Self {
        Self { total: total.max(1), done: 0, shown: std::io::stderr().is_terminal() }
    }

    /// Counts one more step and shows `what` beside the bar.
    pub(super) fn step(&mut self, what: &str) {
        self.done += 1;
        if self.shown {
            let filled = WIDTH * self.done / self.total;
            let bar = format!("{}{}", "#".repeat(filled), ".".repeat(WIDTH - filled.min(WIDTH)));
            let _ = write!(std::io::stderr(), "\r[{bar}] {}/{} {what}\x1b[K", self.done, self.total);
        }
    }
}

impl Drop for Progress {
    /// Clears the bar.
    fn drop(&mut self) {
        if self.shown && self.done > 0 {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
