//! The enclosure of one scenario: its processes, mounts and network devices are visible only inside
//! and end with it.
//!
//! A scenario runs as the first process of its own PID, mount, network and cgroup namespaces. When
//! that process ends, the kernel kills all other processes of the enclosure, including the daemons
//! that containerd detaches. The mounts and network devices disappear with the last process. If the
//! runner is killed, the first process dies with it. Outside remain a directory and a few cgroups,
//! which the runner removes. The next runner removes what a killed runner has left.

mod cgroups;
mod inside;
mod leftovers;

use std::{
    fs, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{self, Command},
    sync::atomic::{AtomicUsize, Ordering},
};

use anyhow::{Context, Result, bail};

use self::cgroups::Hierarchies;
pub(crate) use self::{
    inside::{NODE_ADDRESS, NODE_DEVICE, pod_subnet, set_up},
    leftovers::HostState,
};

/// Prefix of our directories and cgroups. The runner's PID and a number follow. The names are short, because the path of
/// a Unix socket has at most 107 bytes and the kubelet's sockets are deep in the directory.
const PREFIX: &str = "tessera-e2e-";

/// Number of the next enclosure of this runner.
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// The outside of an enclosure. Dropping it removes its directory and cgroups.
#[derive(Debug)]
pub(crate) struct Enclosure {
    id: String,
    directory: PathBuf,
    hierarchies: Hierarchies,
}

impl Enclosure {
    /// Creates an empty enclosure.
    pub(crate) fn create() -> Result<Self> {
        let id = format!("{PREFIX}{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let directory = std::env::temp_dir().join(&id);
        let hierarchies = Hierarchies::mounted()?;
        fs::create_dir(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
        let enclosure = Self { id, directory, hierarchies };
        fs::create_dir(enclosure.logs())?;
        enclosure.hierarchies.create(&enclosure.id)?;
        Ok(enclosure)
    }

    /// Returns the name of the enclosure's directory and cgroups.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Returns the directory of the logs.
    pub(crate) fn logs(&self) -> PathBuf {
        logs_in(&self.directory)
    }

    /// Returns a command that runs this program inside the enclosure. The process dies when the
    /// thread that starts it ends.
    pub(crate) fn command(&self, arguments: &[String]) -> Result<Command> {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(this_program()?);
        command.args(["--stage", "entering", "--directory"]).arg(&self.directory).args(arguments);
        command.process_group(0);
        Ok(command)
    }

    /// Returns the processes in the enclosure. There are none after the first one has ended.
    pub(crate) fn processes(&self) -> Vec<u32> {
        self.hierarchies.processes(&self.id)
    }
}

impl Drop for Enclosure {
    fn drop(&mut self) {
        remove(&self.hierarchies, &self.id, &self.directory);
    }
}

/// Returns the directory of the logs in a scenario's directory.
pub(crate) fn logs_in(directory: &Path) -> PathBuf {
    directory.join("logs")
}

/// Enters the enclosure: this process joins the cgroups and makes them the root of a cgroup namespace. Then it goes on
/// with [`start`].
pub(crate) fn enter(directory: &Path, arguments: &[String]) -> Result<()> {
    Hierarchies::mounted()?.join(id_of(directory)?)?;
    unshare(&["--cgroup"], "entered", directory, arguments)
}

/// Starts the scenario as process 1 of the other namespaces. This process waits for it, in a cgroup of its own, because
/// a cgroup of version 2 delegates its controllers only while it has no processes.
pub(crate) fn start(directory: &Path, arguments: &[String]) -> Result<()> {
    Hierarchies::mounted()?.leave_root(id_of(directory)?)?;
    let namespaces = ["--net", "--mount", "--propagation", "private"];
    let process = ["--pid", "--fork", "--kill-child=KILL", "--mount-proc"];
    unshare(&[namespaces.as_slice(), &process].concat(), "inside", directory, arguments)
}

/// Replaces this process by the next stage in new namespaces. Returns only after a failure.
fn unshare(namespaces: &[&str], stage: &str, directory: &Path, arguments: &[String]) -> Result<()> {
    let mut command = Command::new("unshare");
    command.args(namespaces).arg("--").arg(this_program()?);
    command.args(["--stage", stage, "--directory"]).arg(directory).args(arguments);
    bail!("cannot run unshare: {}", command.exec())
}

fn id_of(directory: &Path) -> Result<&str> {
    directory.file_name().and_then(|name| name.to_str()).context("the directory has no name")
}

/// Creates a cgroup at the root of the enclosure, in every hierarchy.
pub(crate) fn create_cgroup(name: &str) -> Result<()> {
    Hierarchies::mounted()?.create(name)
}

/// Removes directories and cgroups of runners that no longer run.
pub(crate) fn sweep() -> Result<()> {
    let hierarchies = Hierarchies::mounted()?;
    for entry in fs::read_dir(std::env::temp_dir())? {
        let entry = entry?;
        let name = entry.file_name();
        let Some((id, owner)) = name.to_str().and_then(|id| Some((id, owner_of(id)?))) else {
            continue;
        };
        if !Path::new("/proc").join(owner.to_string()).exists() {
            remove(&hierarchies, id, &entry.path());
        }
    }
    Ok(())
}

/// Returns all processes in enclosures of this runner.
pub(crate) fn processes_of(runner: u32) -> Result<Vec<u32>> {
    let hierarchies = Hierarchies::mounted()?;
    let ids = hierarchies.names()?.into_iter().filter(|id| owner_of(id) == Some(runner));
    Ok(ids.flat_map(|id| hierarchies.processes(&id)).collect())
}

/// Returns the remaining directories and cgroups of this runner.
pub(crate) fn remains_of(runner: u32) -> Result<Vec<String>> {
    remains(|name| owner_of(name) == Some(runner))
}

/// Returns the remaining directories and cgroups with a name that `is_searched` accepts.
pub(crate) fn remains(is_searched: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    let directories = fs::read_dir(std::env::temp_dir())?.flatten();
    let directories = directories.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let names = Hierarchies::mounted()?.names()?.into_iter().chain(directories);
    Ok(names.filter(|name| is_searched(name)).collect())
}

/// Returns the PID of the runner that created a directory of this name.
fn owner_of(id: &str) -> Option<u32> {
    id.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

fn remove(hierarchies: &Hierarchies, id: &str, directory: &Path) {
    let removed = hierarchies.remove(id).and_then(|()| match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    });
    if let Err(error) = removed {
        eprintln!("e2e: cannot clean up after {id}: {error}");
    }
}

fn this_program() -> Result<PathBuf> {
    std::env::current_exe().context("cannot find this program's own file")
}

#[cfg(test)]
mod tests {
    use super::owner_of;

    #[test]
    fn only_directories_of_runners_have_an_owner() {
        assert_eq!(owner_of("tessera-e2e-4711-1"), Some(4711));
        assert_eq!(owner_of("tessera-e2e-logs"), None);
        assert_eq!(owner_of("something-4711-else"), None);
    }
}
