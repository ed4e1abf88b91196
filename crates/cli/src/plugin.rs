//! Which plugin this program is: kubectl finds plugins by the names of their files.

use std::ffi::OsStr;
use std::path::Path;

/// A plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plugin {
    /// `kubectl inspect gpu`, also installed as `kubectl inspect gputopology`.
    Gpu,
    /// `kubectl inspect gpushare`.
    Share,
}

impl Plugin {
    /// What a program of this name is, and whether it is to complete a command line instead of running one: kubectl asks
    /// `kubectl_complete-inspect-gpu` for `kubectl inspect gpu`.
    #[must_use]
    pub fn called(program: &OsStr) -> Option<(Self, bool)> {
        let file = Path::new(program).file_stem()?.to_str()?;
        let (rest, completes) = match (file.strip_prefix("kubectl-"), file.strip_prefix("kubectl_complete-"))
        {
            (Some(rest), _) => (rest, false),
            (_, Some(rest)) => (rest, true),
            _ => return None,
        };
        match rest.replace('_', "-").as_str() {
            "inspect-gpu" | "inspect-gputopology" => Some((Self::Gpu, completes)),
            "inspect-gpushare" => Some((Self::Share, completes)),
            _ => None,
        }
    }

    /// What users type.
    #[must_use]
    pub fn command(self) -> &'static str {
        match self {
            Self::Gpu => "kubectl inspect gpu",
            Self::Share => "kubectl inspect gpushare",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files() {
        let called = |name: &str| Plugin::called(OsStr::new(name));
        assert_eq!(called("/usr/bin/kubectl-inspect-gpu"), Some((Plugin::Gpu, false)));
        assert_eq!(called("kubectl-inspect-gputopology.exe"), Some((Plugin::Gpu, false)));
        assert_eq!(called("kubectl-inspect_gpushare"), Some((Plugin::Share, false)));
        assert_eq!(called("kubectl_complete-inspect-gpu"), Some((Plugin::Gpu, true)));
        assert_eq!(called("kubectl_complete-inspect_gpushare"), Some((Plugin::Share, true)));
        assert_eq!(called("inspect"), None);
    }
}
