//! Grant directories: one for each container that holds a share of a GPU. A directory has the two files that the
//! agent shares with the library in the container (see [`tessera_limits`]).
//!
//! ```text
//! <grants>/<pod UID>/.pod                     namespace/name of the pod, for when the API server is not available
//! <grants>/<pod UID>/<container>/control      limits, read-only for the container
//! <grants>/<pod UID>/<container>/account      memory held by its processes, written by the container
//! <grants>/.library/                          library that containers mount
//! <grants>/.memory/                           tmpfs that bounds what containers can write
//! ```
//!
//! A container can make its account file grow. Where a tmpfs is mounted at `.memory`, the directories of new pods are
//! in it, and `<grants>/<pod UID>` is a symbolic link to them. The paths that containers mount are the same in both
//! cases, so pods of an agent without the tmpfs keep their directories until they end.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use tessera_core::units::PodUid;
use tessera_limits::{
    GrantLimits,
    files::{self, open_control_writable},
};
use tessera_node::tmpfs;

use super::account_file;
use crate::controller::ContainerLimits;

/// File with the name of the pod. No container can have this name.
const POD_FILE: &str = ".pod";

/// Directory at which the tmpfs is mounted.
const MEMORY: &str = ".memory";

/// Returns where the tmpfs of a grants directory is mounted.
#[must_use]
pub fn grants_memory(grants: &Path) -> PathBuf {
    grants.join(MEMORY)
}

/// A grant that could not be created.
#[derive(Debug, thiserror::Error)]
pub(super) enum CreateError {
    /// No file system of the grants has room.
    #[error(
        "{directory} is full ({size_mib} MiB); delete pods with the event AccountFileGrew, or enlarge it with \
         tessera mount-grants --size-mib"
    )]
    Full { directory: String, size_mib: u64 },
    #[error(transparent)]
    Io(#[from] io::Error),
}

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

    /// Returns the directory of the tmpfs, if one is mounted.
    pub(super) fn memory(&self) -> Option<PathBuf> {
        Some(grants_memory(&self.root)).filter(|directory| tmpfs::is_mounted(directory))
    }

    pub(super) fn directory(&self, pod: &PodUid, container: &str) -> PathBuf {
        self.root.join(&pod.0).join(container)
    }

    /// Reads the grants of an earlier agent. Limits that cannot be read are returned empty, so that they are written
    /// again.
    pub(super) fn read(&self) -> (BTreeSet<PodUid>, Vec<ContainerLimits>) {
        let (mut pods, mut all) = (BTreeSet::new(), Vec::new());
        // A pod without a link is one whose creation was interrupted.
        let in_memory = subdirectories(&grants_memory(&self.root));
        for pod in subdirectories(&self.root).into_iter().chain(in_memory).collect::<BTreeSet<_>>() {
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
    ///
    /// If there is no room, account files that have grown are cut first. What is left is taken by other grants.
    pub(super) fn create(&self, limits: &ContainerLimits) -> Result<(), CreateError> {
        let is_full = |error: &io::Error| error.kind() == io::ErrorKind::StorageFull;
        let outcome = match self.try_create(limits) {
            Err(error) if is_full(&error) => {
                self.cut_accounts();
                self.try_create(limits)
            }
            outcome => outcome,
        };
        outcome.map_err(|error| {
            if !is_full(&error) {
                return CreateError::Io(error);
            }
            let directory = self.memory().unwrap_or_else(|| self.root.clone());
            let size_mib = tmpfs::size_mib(&directory).unwrap_or_default();
            CreateError::Full { directory: directory.display().to_string(), size_mib }
        })
    }

    /// Cuts the account files that have grown.
    fn cut_accounts(&self) {
        for pod in subdirectories(&self.root) {
            for container in subdirectories(&self.root.join(&pod)) {
                let path = files::account_path(&self.root.join(&pod).join(container));
                if let Ok(file) = fs::OpenOptions::new().write(true).open(path) {
                    account_file::cut(&file);
                }
            }
        }
    }

    /// Creates the directory of a pod, in memory if possible.
    fn create_pod_directory(&self, pod: &PodUid) -> io::Result<PathBuf> {
        let path = self.root.join(&pod.0);
        let in_memory = grants_memory(&self.root).join(&pod.0);
        match path.symlink_metadata() {
            // The directory behind the link is gone after a restart of the node.
            Ok(found) if found.is_symlink() => fs::create_dir_all(in_memory)?,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.memory().is_some() => {
                fs::create_dir_all(in_memory)?;
                symlink(Path::new(MEMORY).join(&pod.0), &path)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::create_dir(&path)?,
            Err(error) => return Err(error),
        }
        Ok(path)
    }

    /// Creates a grant, or puts limits into force in one that exists. An existing account stays.
    pub(super) fn ensure(&self, limits: &ContainerLimits) -> io::Result<()> {
        let directory = self.named_directory(limits)?;
        files::update_grant(&directory, &after(&directory, limits))?;
        Ok(())
    }

    fn try_create(&self, limits: &ContainerLimits) -> io::Result<()> {
        let directory = self.named_directory(limits)?;
        files::create_grant(&directory, &after(&directory, limits))?;
        Ok(())
    }

    /// Creates the directory of a grant, and writes the name of its pod beside it.
    fn named_directory(&self, limits: &ContainerLimits) -> io::Result<PathBuf> {
        let pod = self.create_pod_directory(&limits.pod)?;
        let directory = self.directory(&limits.pod, &limits.container);
        fs::create_dir_all(&directory)?;
        let temporary = pod.join(".pod.new");
        fs::write(&temporary, format!("{}/{}\n", limits.namespace, limits.name))?;
        fs::rename(&temporary, pod.join(POD_FILE))?;
        Ok(directory)
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
        // The link is removed last, so that an interrupted removal is repeated by the next agent.
        for directory in [grants_memory(&self.root).join(&pod.0), directory] {
            if let Err(error) = fs::remove_dir_all(&directory)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(%pod, %error, "cannot remove the grant directory of the pod; it stays until the agent restarts");
            }
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

/// Returns the names of the subdirectories and links, without hidden ones.
fn subdirectories(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let folders =
        entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir() || kind.is_symlink()));
    let names = folders.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| !name.starts_with('.')).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::fs::{FallocateFlags, fallocate};
    use tessera_limits::{
        Bytes, GpuLimit, GpuSlot, UuidBytes, limits::ShareMeaning, memory_account::ProcessIdentity,
    };

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
        let me = account.claim(ProcessIdentity { id: 1, started_ticks: 0 }, 1, |_| {}).unwrap();
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

    /// Marks the process of a test that runs in its own mount namespace.
    const ENCLOSED: &str = "TESSERA_TEST_ENCLOSED";

    /// Runs the named test again in a mount namespace of its own, where it may mount. Returns true in that process.
    fn is_enclosed(test: &str) -> bool {
        if std::env::var_os(ENCLOSED).is_some() {
            return true;
        }
        let mut command = Command::new("unshare");
        // Another user gets the right to mount in a user namespace.
        if !rustix::process::geteuid().is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        let program = std::env::current_exe().unwrap();
        command.arg("--mount").arg(program).args([test, "--exact"]).env(ENCLOSED, "1");
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        false
    }

    /// Returns grants with a tmpfs of 1 MiB.
    fn in_memory(folder: &Path) -> Grants {
        let grants = Grants::at(folder.join("grants")).unwrap();
        assert_eq!(grants.memory(), None);
        let memory = grants_memory(&grants.root);
        assert_eq!(tmpfs::ensure(&memory, 1).unwrap(), tmpfs::Mounting::Mounted);
        assert_eq!(grants.memory(), Some(memory));
        grants
    }

    fn account(grants: &Grants, pod: &str) -> fs::File {
        let path = files::account_path(&grants.directory(&pod.into(), "a"));
        fs::OpenOptions::new().read(true).write(true).open(path).unwrap()
    }

    fn of_pod(pod: &str) -> ContainerLimits {
        ContainerLimits { pod: pod.into(), ..limits("a", 5) }
    }

    #[test]
    fn a_container_cannot_fill_more_than_the_tmpfs_and_grants_survive_that() {
        if !is_enclosed(
            "shell::grants::tests::a_container_cannot_fill_more_than_the_tmpfs_and_grants_survive_that",
        ) {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let grants = in_memory(folder.path());
        grants.create(&of_pod("one")).unwrap();
        grants.create(&of_pod("two")).unwrap();
        // One container fills the file system, by length or by space beyond the end of its file.
        let hidden = FallocateFlags::KEEP_SIZE;
        for flags in [FallocateFlags::empty(), hidden] {
            let file = account(&grants, "one");
            let grown =
                (1..).take_while(|more| fallocate(&file, flags, *more << 12, 1 << 12).is_ok()).count();
            assert!(0 < grown && grown < 256, "the tmpfs has 256 pages, {grown} were added");
            // The other container is not affected, and a new one gets its grant.
            let other = files::open_account(&grants.directory(&"two".into(), "a")).unwrap();
            let me = other.claim(ProcessIdentity { id: 1, started_ticks: 0 }, 1, |_| {}).unwrap();
            other.charge(me, GpuSlot::FIRST, Bytes(3), Bytes(100)).unwrap();
            grants.update(&of_pod("two")).unwrap();
            grants.create(&of_pod("three")).unwrap();
            assert_eq!(account_file::cut(&account(&grants, "one")), None, "it was cut");
            grants.remove(&"three".into());
        }
        // Where grants fill the file system, more are refused, with the cause and the remedy.
        let refused = (0..1000).find_map(|pod| grants.create(&of_pod(&pod.to_string())).err()).unwrap();
        let memory = grants_memory(&grants.root);
        let expected = format!(
            "{} is full (1 MiB); delete pods with the event AccountFileGrew, or enlarge it with tessera mount-grants \
             --size-mib",
            memory.display()
        );
        assert_eq!(refused.to_string(), expected);
        grants.update(&of_pod("two")).unwrap();
        assert_eq!(tmpfs::ensure(&memory, 4).unwrap(), tmpfs::Mounting::Resized);
        grants.create(&of_pod("late")).unwrap();
        assert_eq!(in_force(&grants.directory(&"two".into(), "a")).unwrap().gpus, limits("a", 5).gpus);
    }

    #[test]
    fn grants_of_an_agent_without_tmpfs_stay_where_they_are() {
        if !is_enclosed("shell::grants::tests::grants_of_an_agent_without_tmpfs_stay_where_they_are") {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let before = Grants::at(folder.path().join("grants")).unwrap();
        before.create(&of_pod("old")).unwrap();
        let grants = in_memory(folder.path());
        grants.create(&of_pod("new")).unwrap();
        // A container of the old pod starts again. It mounts the old path.
        grants.create(&of_pod("old")).unwrap();
        let is_link = |pod: &str| grants.root.join(pod).symlink_metadata().unwrap().is_symlink();
        assert_eq!((is_link("old"), is_link("new")), (false, true));
        let (pods, found) = Grants::at(grants.root.clone()).unwrap().read();
        assert_eq!((pods, found.len()), (["new".into(), "old".into()].into(), 2));
        // The node restarts: the memory is gone, and the containers start again.
        let memory = grants_memory(&grants.root);
        rustix::mount::unmount(&memory, rustix::mount::UnmountFlags::DETACH).unwrap();
        tmpfs::ensure(&memory, 1).unwrap();
        assert_eq!(grants.read().0, ["new".into(), "old".into()].into());
        grants.create(&of_pod("new")).unwrap();
        assert_eq!(grants.read().1.len(), 2);
        for pod in ["old", "new"] {
            assert_eq!(grants.remove(&pod.into()).len(), 1);
        }
        assert_eq!(grants.read(), (BTreeSet::new(), Vec::new()));
        assert_eq!(fs::read_dir(memory).unwrap().count(), 0);
    }
}
