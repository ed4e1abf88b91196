//! How many files this process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Allows as many as the system lets us: an agent has a few open for every container with a share, and what it starts with is often
/// 1024.
pub fn allow_many() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "cannot raise the number of open files");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_as_the_system_lets_us() {
        allow_many();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
