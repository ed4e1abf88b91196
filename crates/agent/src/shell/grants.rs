//! Grant directories: one for each container that holds a share of a GPU. A directory has the two files that the
//! agent shares with the library in the container (see [`tessera_limits`]).
//!
//! ```text
//! <grants>/<pod UID>/.pod                     namespace/name of the pod, for when the API server is not available
//! <grants>/<pod UID>/<container>/control      limits, read-only for the container
//! <grants>/<pod UID>/<container>/account      memory held by its processes, written by the container
//! <grants>/.library/                          library that containers mount
//! ```

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use tessera_core::units::PodUid;
use tessera_limits::{
    GrantLimits,
    files::{self, open_control_writable},
};

use crate::controller::ContainerLimits;

/// File with the name of the pod. No container can have this name.
const POD_FILE: &str = ".pod";

#[derive(Clone, Debug)]
pub(super) struct Grants {
    root: PathBuf,
}

impl Grants {
    /// Opens or creates the root directory. Only root may enter it, because any user of a container can write its
    /// account.
    pub(super) fn at(root: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&root)?;
        fs::set_permissions(&root, fs::Permissions::from_mode(0o700))?;
        Ok(Self { root })
    }

    pub(super) fn directory(&self, pod: &PodUid, container: &str) -> PathBuf {
        self.root.join(&pod.0).join(container)
    }

    /// Reads the grants of an earlier agent. Limits that cannot be read are returned empty, so that they are written
    /// again.
    pub(super) fn read(&self) -> (BTreeSet<PodUid>, Vec<ContainerLimits>) {
        let (mut pods, mut all) = (BTreeSet::new(), Vec::new());
        for pod in subdirectories(&self.root) {
            let uid = PodUid(pod.clone());
            let owner = fs::read_to_string(self.root.join(&pod).join(POD_FILE)).unwrap_or_default();
            let (namespace, name) = owner.trim_end().split_once('/').unwrap_or_default();
            for container in subdirectories(&self.root.join(&pod)) {
                let GrantLimits { meaning, gpus, .. } =
                    in_force(&self.directory(&uid, &container)).unwrap_or_default();
                all.push(ContainerLimits {
                    pod: uid.clone(),
                    namespace: namespace.to_owned(),
                    name: name.to_owned(),
                    container,
                    meaning,
                    gpus,
                });
            }
            pods.insert(uid);
        }
        (pods, all)
    }

    /// Creates the grant of a container that is about to start.
    pub(super) fn create(&self, limits: &ContainerLimits) -> io::Result<()> {
        let directory = self.directory(&limits.pod, &limits.container);
        fs::create_dir_all(&directory)?;
        let pod = self.root.join(&limits.pod.0);
        let temporary = pod.join(".pod.new");
        fs::write(&temporary, format!("{}/{}\n", limits.namespace, limits.name))?;
        fs::rename(&temporary, pod.join(POD_FILE))?;
        files::create_grant(&directory, &after(&directory, limits))?;
        Ok(())
    }

    /// Changes the limits of a running container.
    pub(super) fn update(&self, limits: &ContainerLimits) -> io::Result<()> {
        let directory = self.directory(&limits.pod, &limits.container);
        files::update_grant(&directory, &after(&directory, limits))?;
        Ok(())
    }

    /// Removes the grants of a pod and returns the directories of its containers.
    pub(super) fn remove(&self, pod: &PodUid) -> Vec<PathBuf> {
        // A UID must be a single path component.
        if pod.0.is_empty() || pod.0.contains(['/', '.']) {
            return Vec::new();
        }
        let directory = self.root.join(&pod.0);
        let containers = subdirectories(&directory).into_iter().map(|name| directory.join(name)).collect();
        if let Err(error) = fs::remove_dir_all(&directory)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%pod, %error, "cannot remove the grant directory of the pod; it stays until the agent restarts");
        }
        containers
    }
}

/// Returns the limits in a directory.
fn in_force(directory: &Path) -> Option<GrantLimits> {
    open_control_writable(directory).ok()?.read().ok()
}

/// Returns the limits to write. Their generation grows if they differ from the current ones.
fn after(directory: &Path, limits: &ContainerLimits) -> GrantLimits {
    let before = in_force(directory);
    let generation = match &before {
        None => 1,
        Some(same) if same.meaning == limits.meaning && same.gpus == limits.gpus => same.generation,
        Some(other) => other.generation + 1,
    };
    GrantLimits { generation, meaning: limits.meaning, gpus: limits.gpus.clone() }
}

/// Returns the names of the subdirectories, without hidden ones.
fn subdirectories(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let names = folders.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| !name.starts_with('.')).collect()
}

#[cfg(test)]
mod tests {
    use tessera_limits::{Bytes, GpuLimit, GpuSlot, UuidBytes, limits::ShareMeaning};

    use super::*;

    fn limits(container: &str, memory: u64) -> ContainerLimits {
        ContainerLimits {
            pod: "u".into(),
            namespace: "team".into(),
            name: "p".into(),
            container: container.into(),
            meaning: ShareMeaning::Throughput,
            gpus: vec![GpuLimit {
                uuid: UuidBytes([7; 16]),
                memory: Bytes(memory),
                context: Bytes::ZERO,
                compute_percent: 30,
                compute_ceiling_percent: 60,
            }],
        }
    }

    #[test]
    fn reads_the_grants_of_an_earlier_agent() {
        let folder = tempfile::tempdir().unwrap();
        let grants = Grants::at(folder.path().join("grants")).unwrap();
        for container in ["a", "b"] {
            grants.create(&limits(container, 5)).unwrap();
        }
        fs::create_dir_all(folder.path().join("grants/.library")).unwrap();
        fs::create_dir_all(folder.path().join("grants/half-made")).unwrap();
        let (pods, mut found) = Grants::at(folder.path().join("grants")).unwrap().read();
        assert_eq!(pods, ["half-made".into(), "u".into()].into());
        found.sort_by(|a, b| a.container.cmp(&b.container));
        assert_eq!(found, [limits("a", 5), limits("b", 5)]);
        assert_eq!(grants.remove(&"u".into()).len(), 2);
        assert!(grants.read().1.is_empty());
        assert!(grants.remove(&"../grants".into()).is_empty() && folder.path().join("grants").exists());
    }

    #[test]
    fn an_update_is_a_new_generation_and_keeps_the_account() {
        let folder = tempfile::tempdir().unwrap();
        let grants = Grants::at(folder.path().to_owned()).unwrap();
        grants.create(&limits("a", 5)).unwrap();
        let directory = grants.directory(&"u".into(), "a");
        let account = files::open_account(&directory).unwrap();
        let me = account.claim(1, 1, |_| {}).unwrap();
        account.charge(me, GpuSlot::FIRST, Bytes(3), Bytes(5)).unwrap();
        grants.update(&limits("a", 5)).unwrap();
        assert_eq!(in_force(&directory).unwrap().generation, 1, "equal limits keep their generation");
        grants.update(&limits("a", 9)).unwrap();
        let now = in_force(&directory).unwrap();
        assert_eq!((now.generation, now.gpus[0].memory), (2, Bytes(9)));
        assert_eq!(files::open_account(&directory).unwrap().held(GpuSlot::FIRST), Bytes(3));
        grants.create(&limits("a", 9)).unwrap();
        assert_eq!(
            files::open_account(&directory).unwrap().held(GpuSlot::FIRST),
            Bytes::ZERO,
            "a restarted container has a new account"
        );
    }

    #[test]
    fn reads_damaged_limits_as_empty() {
        let folder = tempfile::tempdir().unwrap();
        let grants = Grants::at(folder.path().to_owned()).unwrap();
        grants.create(&limits("a", 5)).unwrap();
        let directory = grants.directory(&"u".into(), "a");
        fs::write(directory.join("control"), "damaged").unwrap();
        assert!(grants.read().1[0].gpus.is_empty());
        grants.update(&limits("a", 5)).unwrap();
        assert_eq!(grants.read().1, [limits("a", 5)]);
    }
}
