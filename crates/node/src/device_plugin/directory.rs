//! Waits for changes in a directory.

use std::{io, path::Path, time::Duration};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::{net::unix::pipe::Receiver, time::sleep};

/// Time between two polls without inotify. A restarted kubelet admits its first pod about 0.4 s
/// after it listens, and rejects pods whose plugin is not registered by then.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Time between two polls with inotify, as a safeguard.
const FALLBACK_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// An inotify watch on a directory, or `None` if inotify is not available. It is read like a pipe.
#[derive(Debug)]
pub(crate) struct DirectoryWatch(Option<Receiver>);

impl DirectoryWatch {
    /// Starts to watch the directory.
    pub(crate) fn on(directory: &Path) -> Self {
        let watch = || -> io::Result<Receiver> {
            let watch = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
            let changes = WatchFlags::CREATE
                | WatchFlags::DELETE
                | WatchFlags::MOVED_FROM
                | WatchFlags::MOVED_TO
                | WatchFlags::DELETE_SELF
                | WatchFlags::MOVE_SELF;
            inotify::add_watch(&watch, directory, changes)?;
            Receiver::from_owned_fd_unchecked(watch)
        };
        let watch = watch().inspect_err(|error| {
            tracing::debug!(directory = %directory.display(), %error, "cannot watch the directory; will poll it");
        });
        Self(watch.ok())
    }

    /// Waits until the directory may have changed.
    pub(crate) async fn changed(&self) {
        let Some(watch) = &self.0 else { return sleep(POLL_INTERVAL).await };
        tokio::select! {
            () = drain(watch) => {}
            () = sleep(FALLBACK_POLL_INTERVAL) => {}
        }
    }
}

/// Waits for events and reads all of them, so that the next call waits for new events.
async fn drain(watch: &Receiver) {
    let mut events = [0; 4096];
    while watch.readable().await.is_ok() {
        match watch.try_read(&mut events) {
            Ok(length) if length > 0 => return,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => break,
        }
    }
    // The watch failed, so this function falls back to polling.
    sleep(POLL_INTERVAL).await;
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn reports_changes_once() {
        let directory = tempfile::tempdir().unwrap();
        let watch = DirectoryWatch::on(directory.path()).0.unwrap();
        let file = directory.path().join("a.sock");
        for _ in 0..2 {
            fs::write(&file, "").unwrap();
            fs::remove_file(&file).unwrap();
            drain(&watch).await;
            let left = watch.try_read(&mut [0; 64]).map_err(|error| error.kind());
            assert_eq!(left, Err(io::ErrorKind::WouldBlock), "all events were read");
        }
    }

    #[tokio::test]
    async fn polls_a_directory_that_cannot_be_watched() {
        let watch = DirectoryWatch::on(Path::new("/nowhere"));
        assert!(watch.0.is_none());
        watch.changed().await;
    }
}
