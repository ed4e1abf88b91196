//! Sets up the namespaces from inside, before anything else starts.

use std::{fs, net::Ipv4Addr, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

use super::cgroups::{Hierarchies, Hierarchy, delegable};

/// Address of the host for nodes and pods. A kubelet accepts no loopback address.
pub(crate) const NODE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 1);

/// Bridge with this address. Every kernel can create a bridge.
pub(crate) const NODE_DEVICE: &str = "e2e-node";

/// Returns the pod network of the real node with this number.
pub(crate) fn pod_subnet(node: u8) -> String {
    format!("10.89.{node}.0/24")
}

/// Turns the namespaces into a separate host: cgroups of its own, empty `/run`, `/var/lib` and
/// `/var/log`, and a network.
pub(crate) fn set_up(directory: &Path) -> Result<()> {
    for hierarchy in &Hierarchies::mounted()?.0 {
        mount_again(hierarchy)?;
        delegate_controllers(&hierarchy.mount_point)?;
    }
    command("mount", &["-t", "tmpfs", "tmpfs", "/run"])?;
    for place in ["/var/lib", "/var/log"] {
        let own = directory.join("state").join(place.trim_start_matches('/'));
        fs::create_dir_all(&own)?;
        command("mount", &["--bind", &own.display().to_string(), place])?;
    }
    let address = format!("{NODE_ADDRESS}/24");
    command("ip", &["link", "set", "lo", "up"])?;
    command("ip", &["link", "add", NODE_DEVICE, "type", "bridge"])?;
    command("ip", &["address", "add", &address, "dev", NODE_DEVICE])?;
    command("ip", &["link", "set", NODE_DEVICE, "up"])
}

/// Mounts a cgroup hierarchy again. The inherited mounts show the host's cgroups; a new mount shows
/// ours as its root.
fn mount_again(hierarchy: &Hierarchy) -> Result<()> {
    let Hierarchy { mount_point, kind, options } = hierarchy;
    let place = mount_point.display().to_string();
    command("umount", &[&place])?;
    match options.as_str() {
        "" => command("mount", &["-t", kind, kind, &place]),
        _ => command("mount", &["-t", kind, "-o", options, kind, &place]),
    }
}

/// Delegates the controllers of version 2. The processes of the enclosure have left this cgroup before.
fn delegate_controllers(root: &Path) -> Result<()> {
    for controller in delegable(root) {
        fs::write(root.join("cgroup.subtree_control"), format!("+{controller}"))
            .with_context(|| format!("cannot pass on the cgroup controller {controller}"))?;
    }
    Ok(())
}

fn command(program: &str, arguments: &[&str]) -> Result<()> {
    let output =
        Command::new(program).args(arguments).output().with_context(|| format!("cannot run {program}"))?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {} failed: {}", arguments.join(" "), complaint.trim());
    Ok(())
}
