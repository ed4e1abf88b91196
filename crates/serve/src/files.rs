//! Files that may change at run time. They are polled, because a mounted ConfigMap or Secret is replaced without
//! a notification.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Files that are read together, such as a certificate and its key.
#[derive(Debug)]
pub struct Files {
    paths: Vec<PathBuf>,
    last: Option<Vec<Vec<u8>>>,
}

impl Files {
    /// Creates a reader for these files without reading them.
    #[must_use]
    pub fn new(paths: &[&Path]) -> Self {
        Self { paths: paths.iter().map(|path| (*path).to_owned()).collect(), last: None }
    }

    /// Reads the files. Returns their contents if any file has changed since the last call.
    pub fn read_if_changed(&mut self) -> io::Result<Option<&[Vec<u8>]>> {
        let contents: Vec<Vec<u8>> = self.paths.iter().map(std::fs::read).collect::<io::Result<_>>()?;
        if self.last.as_ref() == Some(&contents) {
            return Ok(None);
        }
        Ok(Some(self.last.insert(contents)))
    }

    /// Polls the files and calls `changed` with new contents. Unreadable files are logged and keep their contents.
    pub async fn follow(mut self, mut changed: impl FnMut(&[Vec<u8>])) {
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            match self.read_if_changed() {
                Ok(Some(contents)) => changed(contents),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(files = ?self.paths, %error, "cannot read the files; the previous contents stay in use")
                }
            }
        }
    }
}
