//! The cgroups of an enclosure: one in every hierarchy, the parent of all cgroups of its kubelets.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    process,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

/// Time in which a cgroup must be removable after the death of its last process.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(10);

/// A mounted cgroup hierarchy: the only one of version 2, or one of several of version 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hierarchy {
    pub(super) mount_point: PathBuf,
    /// File system type: `cgroup` or `cgroup2`.
    pub(super) kind: String,
    /// Options of `mount` for the same hierarchy. Empty for version 2.
    pub(super) options: String,
}

/// All mounted hierarchies.
#[derive(Debug)]
pub(super) struct Hierarchies(pub(super) Vec<Hierarchy>);

impl Hierarchies {
    pub(super) fn mounted() -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("cannot read the list of mounts")?;
        let hierarchies: Vec<_> = mounts.lines().filter_map(parse_mount).collect();
        ensure!(!hierarchies.is_empty(), "no cgroups are mounted on this host; a kubelet needs them");
        Ok(Self(hierarchies))
    }

    /// Returns the names of the top cgroups of all hierarchies.
    pub(super) fn names(&self) -> io::Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        for Hierarchy { mount_point, .. } in &self.0 {
            for entry in fs::read_dir(mount_point)? {
                names.insert(entry?.file_name().to_string_lossy().into_owned());
            }
        }
        Ok(names)
    }

    pub(super) fn create(&self, name: &str) -> Result<()> {
        for Hierarchy { mount_point, .. } in &self.0 {
            let group = mount_point.join(name);
            fs::create_dir(&group).with_context(|| format!("cannot make the cgroup {}", group.display()))?;
            // A new cpuset of version 1 accepts no process until it has CPUs.
            for setting in ["cpuset.cpus", "cpuset.mems"] {
                if let Ok(inherited) = fs::read_to_string(mount_point.join(setting)) {
                    fs::write(group.join(setting), inherited)?;
                }
            }
        }
        Ok(())
    }

    /// Moves this process into the cgroup.
    pub(super) fn join(&self, name: &str) -> Result<()> {
        for Hierarchy { mount_point, .. } in &self.0 {
            let group = mount_point.join(name);
            fs::write(group.join("cgroup.procs"), process::id().to_string())
                .with_context(|| format!("cannot enter the cgroup {}", group.display()))?;
        }
        Ok(())
    }

    /// Moves this process one level down where the cgroup has controllers to delegate.
    pub(super) fn leave_root(&self, name: &str) -> Result<()> {
        for Hierarchy { mount_point, .. } in &self.0 {
            let group = mount_point.join(name);
            if !delegable(&group).is_empty() {
                let own = group.join("harness");
                fs::create_dir(&own)?;
                fs::write(own.join("cgroup.procs"), process::id().to_string())
                    .with_context(|| format!("cannot enter the cgroup {}", own.display()))?;
            }
        }
        Ok(())
    }

    /// Returns every process in the cgroup and below it.
    pub(super) fn processes(&self, name: &str) -> Vec<u32> {
        let mut all: Vec<u32> = self
            .0
            .iter()
            .flat_map(|hierarchy| groups_below(&hierarchy.mount_point.join(name)))
            .filter_map(|group| fs::read_to_string(group.join("cgroup.procs")).ok())
            .flat_map(|list| list.lines().filter_map(|id| id.parse().ok()).collect::<Vec<_>>())
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Removes the cgroup and everything below it.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        let give_up = Instant::now() + REMOVE_TIMEOUT;
        for Hierarchy { mount_point, .. } in &self.0 {
            for group in groups_below(&mount_point.join(name)) {
                loop {
                    match fs::remove_dir(&group) {
                        Ok(()) => break,
                        Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                        Err(error) if Instant::now() >= give_up => return Err(error),
                        Err(_busy) => sleep(Duration::from_millis(20)),
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns the controllers that a cgroup of version 2 can pass on to its children. There are none in version 1.
pub(super) fn delegable(group: &Path) -> Vec<String> {
    let controllers = fs::read_to_string(group.join("cgroup.controllers")).unwrap_or_default();
    controllers.split_whitespace().map(str::to_owned).collect()
}

/// Returns the cgroup and its descendants, the deepest first.
fn groups_below(group: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(group) else {
        return Vec::new();
    };
    let mut groups: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .flat_map(|entry| groups_below(&entry.path()))
        .collect();
    groups.push(group.to_owned());
    groups
}

/// Parses a line of mountinfo. Returns `None` if it is not a cgroup hierarchy.
fn parse_mount(line: &str) -> Option<Hierarchy> {
    let (place, filesystem) = line.split_once(" - ")?;
    let mount_point = place.split(' ').nth(4)?;
    let mut filesystem = filesystem.split(' ');
    let kind = filesystem.next().filter(|kind| matches!(*kind, "cgroup" | "cgroup2"))?;
    let options = match kind {
        "cgroup" => controllers(filesystem.nth(1)?),
        _ => String::new(),
    };
    Some(Hierarchy { mount_point: mount_point.into(), kind: kind.into(), options })
}

/// Returns the mount options that identify a hierarchy of version 1.
fn controllers(options: &str) -> String {
    let mut kept: Vec<&str> = options
        .split(',')
        .filter(|option| {
            !matches!(*option, "rw" | "ro" | "xattr" | "clone_children")
                && !option.starts_with("release_agent=")
        })
        .collect();
    if kept.iter().any(|option| option.starts_with("name=")) {
        kept.insert(0, "none");
    }
    kept.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Option<(String, String, String)> {
        parse_mount(line).map(|h| (h.mount_point.display().to_string(), h.kind, h.options))
    }

    #[test]
    fn finds_cgroup_mounts_of_both_versions() {
        let owned = |a: &str, b: &str, c: &str| Some((a.to_owned(), b.to_owned(), c.to_owned()));
        assert_eq!(
            parse("30 29 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"),
            owned("/sys/fs/cgroup", "cgroup2", "")
        );
        assert_eq!(
            parse("48 47 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"),
            owned("/sys/fs/cgroup/cpu,cpuacct", "cgroup", "cpu,cpuacct")
        );
        assert_eq!(
            parse("56 47 0:37 / /c/systemd rw - cgroup cgroup rw,xattr,release_agent=/x,name=systemd"),
            owned("/c/systemd", "cgroup", "none,name=systemd")
        );
        assert_eq!(parse("22 1 254:0 / / rw - ext4 /dev/vda rw"), None);
    }
}
