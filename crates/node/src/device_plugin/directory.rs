//! Waiting until something comes or goes in a directory.

use std::{io, path::Path, time::Duration};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::{net::unix::pipe::Receiver, time::sleep};

/// How often to look where the kernel does not tell. A restarted kubelet admits its first pod about 0.4 s after it listens; a
/// plugin that is not back by then costs those pods their life.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How often to look all the same where it does.
const LOOK_ANYWAY: Duration = Duration::from_secs(1);

/// The kernel's word on a directory, where it can be had. It is read like a pipe.
#[derive(Debug)]
pub(super) struct DirectoryWatch(Option<Receiver>);

impl DirectoryWatch {
    /// Whatever happens in the directory from now on is noticed.
    pub(super) fn on(directory: &Path) -> Self {
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
            tracing::debug!(directory = %directory.display(), %error, "cannot watch, will look often");
        });
        Self(watch.ok())
    }

    /// Comes back when something may have changed.
    pub(super) async fn may_have_changed(&self) {
        let Some(watch) = &self.0 else { return sleep(LOOK_EVERY).await };
        tokio::select! {
            () = news(watch) => {}
            () = sleep(LOOK_ANYWAY) => {}
        }
    }
}

/// Waits for news and takes all there is, so that the next wait is for what comes after.
async fn news(watch: &Receiver) {
    let mut events = [0; 4096];
    while watch.readable().await.is_ok() {
        match watch.try_read(&mut events) {
            Ok(length) if length > 0 => return,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => break,
        }
    }
    // The watch does not work any more.
    sleep(LOOK_EVERY).await;
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn what_comes_and_goes_is_noticed_at_once_and_everything_once() {
        let directory = tempfile::tempdir().unwrap();
        let watch = DirectoryWatch::on(directory.path()).0.unwrap();
        let file = directory.path().join("a.sock");
        for _ in 0..2 {
            fs::write(&file, "").unwrap();
            fs::remove_file(&file).unwrap();
            news(&watch).await;
            let left = watch.try_read(&mut [0; 64]).map_err(|error| error.kind());
            assert_eq!(left, Err(io::ErrorKind::WouldBlock), "everything was taken");
        }
    }

    #[tokio::test]
    async fn a_directory_that_cannot_be_watched_is_looked_at() {
        let watch = DirectoryWatch::on(Path::new("/nowhere"));
        assert!(watch.0.is_none());
        watch.may_have_changed().await;
    }
}
