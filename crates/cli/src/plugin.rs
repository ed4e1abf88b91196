//! Selects the plugin by the program's file name, by which kubectl finds plugins.

use std::ffi::OsStr;
use std::path::Path;

/// One of the two kubectl plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plugin {
    /// `kubectl inspect gpu`, also installed as `kubectl inspect gputopology`.
    Gpu,
    /// `kubectl inspect gpushare`.
    Share,
}

impl Plugin {
    /// Returns the plugin of a program file, and whether the program completes a command line
    /// instead of running it. kubectl calls `kubectl_complete-inspect-gpu` to complete `kubectl
    /// inspect gpu`.
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

    /// Returns the command that users type.
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
    fn selects_the_plugin_by_file_name() {
        let called = |name: &str| Plugin::called(OsStr::new(name));
        assert_eq!(called("/usr/bin/kubectl-inspect-gpu"), Some((Plugin::Gpu, false)));
        assert_eq!(called("kubectl-inspect-gputopology.exe"), Some((Plugin::Gpu, false)));
        assert_eq!(called("kubectl-inspect_gpushare"), Some((Plugin::Share, false)));
        assert_eq!(called("kubectl_complete-inspect-gpu"), Some((Plugin::Gpu, true)));
        assert_eq!(called("kubectl_complete-inspect_gpushare"), Some((Plugin::Share, true)));
        assert_eq!(called("inspect"), None);
    }
}
