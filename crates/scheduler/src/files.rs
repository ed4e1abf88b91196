//! Files that may change while we run: looked at every few seconds, as a mounted ConfigMap or Secret is swapped without
//! a word.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often a file is looked at.
const EVERY: Duration = Duration::from_secs(2);

/// Several files that belong together, as a certificate and its key do.
#[derive(Debug)]
pub struct Files {
    paths: Vec<PathBuf>,
    last: Option<Vec<Vec<u8>>>,
}

impl Files {
    /// These files, none of them read yet.
    #[must_use]
    pub fn new(paths: &[&Path]) -> Self {
        Self { paths: paths.iter().map(|path| (*path).to_owned()).collect(), last: None }
    }

    /// Their contents, where any is another than the last time.
    pub fn read_if_changed(&mut self) -> io::Result<Option<&[Vec<u8>]>> {
        let contents: Vec<Vec<u8>> = self.paths.iter().map(std::fs::read).collect::<io::Result<_>>()?;
        if self.last.as_ref() == Some(&contents) {
            return Ok(None);
        }
        Ok(Some(self.last.insert(contents)))
    }

    /// Calls `changed` with the new contents whenever there are any. A file that cannot be read stays as it was.
    pub async fn follow(mut self, mut changed: impl FnMut(&[Vec<u8>])) {
        loop {
            tokio::time::sleep(EVERY).await;
            match self.read_if_changed() {
                Ok(Some(contents)) => changed(contents),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(files = ?self.paths, %error, "cannot read; keeping what there was")
                }
            }
        }
    }
}
