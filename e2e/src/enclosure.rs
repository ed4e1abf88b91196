//! The enclosure of one scenario: everything it starts, mounts or plugs together is seen by itself alone and ends with it.
//!
//! A scenario runs as the first process of its own PID, mount, network and cgroup namespaces. When that process ends, for
//! whatever reason, the kernel kills all others in there (also the daemons that containerd detaches), and with the last of
//! them go the mounts and the network devices. If the runner itself is killed, the first process dies with it. Outside
//! remain a directory and a few cgroups, which the runner removes; what a killed runner left is removed by the next one.

mod cgroups;
mod inside;
mod leftovers;

use std::{
    fs, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{self, Command},
};

use anyhow::{Context, Result, bail};

use self::cgroups::Hierarchies;
pub(crate) use self::{
    inside::{NODE_ADDRESS, pod_subnet, set_up},
    leftovers::MachineState,
};

/// How directories and cgroups of ours are called; the runner's process id and the scenario follow.
const PREFIX: &str = "tessera-e2e-";

/// The outside of an enclosure. Dropping it removes what is left there.
#[derive(Debug)]
pub(crate) struct Enclosure {
    id: String,
    directory: PathBuf,
    hierarchies: Hierarchies,
}

impl Enclosure {
    /// Prepares an empty one.
    pub(crate) fn create(scenario: &str) -> Result<Self> {
        let id = format!("{PREFIX}{}-{scenario}", process::id());
        let directory = std::env::temp_dir().join(&id);
        let hierarchies = Hierarchies::mounted()?;
        fs::create_dir(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
        let enclosure = Self { id, directory, hierarchies };
        fs::create_dir(enclosure.logs())?;
        enclosure.hierarchies.create(&enclosure.id)?;
        Ok(enclosure)
    }

    /// The logs of what it starts.
    pub(crate) fn logs(&self) -> PathBuf {
        logs_in(&self.directory)
    }

    /// A command that runs this program again, enclosed. It dies when the thread that starts it ends.
    pub(crate) fn command(&self, arguments: &[String]) -> Result<Command> {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(this_program()?);
        command.args(["--stage", "entering", "--directory"]).arg(&self.directory).args(arguments);
        command.process_group(0);
        Ok(command)
    }

    /// Processes that are still in there; none, once the first has ended.
    pub(crate) fn processes(&self) -> Vec<u32> {
        self.hierarchies.processes(&self.id)
    }
}

impl Drop for Enclosure {
    fn drop(&mut self) {
        remove(&self.hierarchies, &self.id, &self.directory);
    }
}

/// Where a scenario's directory has the logs.
pub(crate) fn logs_in(directory: &Path) -> PathBuf {
    directory.join("logs")
}

/// The middle stage: this process joins the cgroups, then becomes `unshare`, which starts the inside as process 1.
pub(crate) fn enter(directory: &Path, arguments: &[String]) -> Result<()> {
    let id = directory.file_name().and_then(|name| name.to_str()).context("the directory has no name")?;
    Hierarchies::mounted()?.join(id)?;
    let error = Command::new("unshare")
        .args(["--cgroup", "--net", "--mount", "--propagation", "private"])
        .args(["--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--"])
        .arg(this_program()?)
        .args(["--stage", "inside", "--directory"])
        .arg(directory)
        .args(arguments)
        .exec();
    bail!("cannot run unshare: {error}")
}

/// Removes what runners that no longer live have left.
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

/// All processes in enclosures of this runner.
pub(crate) fn processes_of(runner: u32) -> Result<Vec<u32>> {
    let hierarchies = Hierarchies::mounted()?;
    let ids = hierarchies.names()?.into_iter().filter(|id| owner_of(id) == Some(runner));
    Ok(ids.flat_map(|id| hierarchies.processes(&id)).collect())
}

/// What is left outside of enclosures of this runner: directories and cgroups.
pub(crate) fn remains_of(runner: u32) -> Result<Vec<String>> {
    let directories = fs::read_dir(std::env::temp_dir())?.flatten();
    let directories = directories.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let names = Hierarchies::mounted()?.names()?.into_iter().chain(directories);
    Ok(names.filter(|name| owner_of(name) == Some(runner)).collect())
}

/// The process that made the directory of this name.
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
    fn only_our_directories_have_an_owner() {
        assert_eq!(owner_of("tessera-e2e-4711-pod-runs"), Some(4711));
        assert_eq!(owner_of("tessera-e2e-logs"), None);
        assert_eq!(owner_of("something-4711-else"), None);
    }
}
