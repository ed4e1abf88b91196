//! Checks that a run has not changed the host.

use std::{collections::BTreeSet, fs};

use anyhow::{Context, Result};

/// The host's mounts and network devices, which a run must not change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostState {
    mounts: BTreeSet<String>,
    devices: BTreeSet<String>,
}

impl HostState {
    /// Reads the current state.
    pub(crate) fn now() -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("cannot read the list of mounts")?;
        let devices = fs::read_dir("/sys/class/net").context("cannot list the network devices")?;
        Ok(Self {
            mounts: mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(str::to_owned).collect(),
            devices: devices
                .flatten()
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .collect(),
        })
    }

    /// Returns what was added since `then`, one line each.
    pub(crate) fn added_since(&self, then: &Self) -> Vec<String> {
        let mounts = self.mounts.difference(&then.mounts).map(|mount| format!("mount {mount}"));
        let devices = self.devices.difference(&then.devices).map(|device| format!("network device {device}"));
        mounts.chain(devices).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_added_mounts_and_devices() {
        let then = HostState { mounts: ["/".into()].into(), devices: ["lo".into(), "eth0".into()].into() };
        let mut now = then.clone();
        assert!(now.added_since(&then).is_empty());
        now.mounts.insert("/x".into());
        now.devices.remove("eth0");
        now.devices.insert("cni0".into());
        assert_eq!(now.added_since(&then), ["mount /x", "network device cni0"]);
    }
}
