//! What the kernel reports about a process in `/proc/PID/stat`.

use crate::memory_account::ProcessIdentity;

/// The fields of `/proc/PID/stat` that show whether a process runs, is stopped or has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessStat {
    /// True if the first thread of the process has ended.
    pub is_zombie: bool,
    /// True if a signal or a debugger has stopped the process.
    pub is_stopped: bool,
    /// Number of threads that have not ended, and the first one.
    pub threads: u32,
    /// Start time in clock ticks since boot.
    pub started_ticks: u64,
}

impl ProcessStat {
    /// Parses the content of `/proc/PID/stat`.
    #[must_use]
    pub fn parse(stat: &[u8]) -> Option<Self> {
        // The name of the program is in parentheses and may itself contain parentheses and spaces.
        let name_end = stat.iter().rposition(|&byte| byte == b')')?;
        let rest = std::str::from_utf8(stat.get(name_end + 1..)?).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        let state = fields.next()?;
        let (is_zombie, is_stopped) = (matches!(state, "Z" | "X" | "x"), matches!(state, "T" | "t"));
        let threads = fields.nth(16)?.parse().ok()?;
        let started_ticks = fields.nth(1)?.parse().ok()?;
        Some(Self { is_zombie, is_stopped, threads, started_ticks })
    }

    /// Returns whether this is the process `expected` and it has not ended.
    ///
    /// The kernel closes the files of a process when its last thread ends. The first thread of a
    /// killed process may end before the others.
    #[must_use]
    pub fn is_running(&self, expected: ProcessIdentity) -> bool {
        let is_same = expected.started_ticks == 0 || expected.started_ticks == self.started_ticks;
        is_same && (!self.is_zombie || self.threads > 1)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn stat(state: char, threads: u32) -> Option<ProcessStat> {
        let text = format!(
            "7 (a) b (c)) {state} 1 7 7 0 -1 4194560 5 0 0 0 1 2 0 0 20 0 {threads} 0 9000 8 9 1 1 1 0 0"
        );
        ProcessStat::parse(text.as_bytes())
    }

    #[test]
    fn parses_the_stat_of_this_process() {
        let stat = ProcessStat::parse(&std::fs::read("/proc/self/stat").unwrap()).unwrap();
        assert!(!stat.is_zombie && stat.threads > 0 && stat.started_ticks > 0);
        assert!(stat.is_running(ProcessIdentity { id: 1, started_ticks: stat.started_ticks }));
        for damaged in ["", "7 (a", "7 (a) R", "7 (a) R 1 7 7 0 -1 4194560 5 0 0 0 1 2 0 0 20 0 x 0 9000"] {
            assert_eq!(ProcessStat::parse(damaged.as_bytes()), None);
        }
    }

    #[test]
    fn a_process_has_ended_when_its_last_thread_has() {
        let is_running = |state, threads, started_ticks| {
            stat(state, threads).unwrap().is_running(ProcessIdentity { id: 7, started_ticks })
        };
        assert!(is_running('S', 3, 9000) && is_running('R', 1, 9000));
        assert!(is_running('Z', 2, 9000), "another thread of a killed process still runs");
        assert!(!is_running('Z', 1, 9000) && !is_running('X', 1, 9000));
        assert!(!is_running('S', 1, 8999), "another process has the same id");
        assert!(is_running('S', 1, 0), "the start time is unknown");
    }
}
