//! Grant directories: one for each container that holds cards, mounted into it, with its limits in a file.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use tessera_core::units::PodUid;
use tessera_wire::limits::{self, Limits};

#[derive(Debug)]
pub(super) struct Grants {
    root: PathBuf,
}

impl Grants {
    pub(super) fn at(root: PathBuf) -> Self {
        Self { root }
    }

    /// What an earlier agent wrote. Files that cannot be read are passed over.
    pub(super) fn read(&self) -> Vec<Limits> {
        let below = |directory: &Path| {
            let entries = fs::read_dir(directory).into_iter().flatten();
            entries.filter_map(|entry| Some(entry.ok()?.path())).collect::<Vec<_>>()
        };
        let containers = below(&self.root).into_iter().flat_map(|pod| below(&pod));
        containers
            .filter_map(|container| {
                limits::parse(&fs::read_to_string(container.join(limits::FILE)).ok()?).ok()
            })
            .collect()
    }

    /// Writes each file whole or not at all: a container may be reading it.
    pub(super) fn write(&self, all: &[Limits]) -> io::Result<()> {
        for one in all {
            let directory = self.root.join(&one.pod).join(&one.container);
            fs::create_dir_all(&directory)?;
            let temporary = directory.join(".limits.new");
            fs::write(&temporary, limits::print(one))?;
            fs::rename(&temporary, directory.join(limits::FILE))?;
        }
        Ok(())
    }

    pub(super) fn remove(&self, pod: &PodUid) {
        // A UID is one path component, whoever made it.
        if pod.0.is_empty() || pod.0.contains(['/', '.']) {
            return;
        }
        if let Err(error) = fs::remove_dir_all(self.root.join(&pod.0))
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%pod, %error, "cannot remove a grant directory");
        }
    }
}
