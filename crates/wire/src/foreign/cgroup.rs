//! Finds the pod and container of a process from the text of `/proc/<pid>/cgroup`.
//!
//! Every kubelet driver, container runtime and cgroup version writes the path in its own way, and a
//! reader in its own cgroup namespace sees the path without its first components. All forms have
//! one thing in common: one component names the pod, and a later component names the container.

/// The owner of a process, as far as its cgroup path shows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CgroupOwner {
    /// A container of a pod.
    Pod {
        /// The UID that the kubelet uses. For static pods it differs from the API server's UID.
        uid: String,
        /// The container's ID, or `None` if the process runs in the pod but in no container.
        container: Option<String>,
    },
    /// A container whose path names no pod.
    Container(String),
    /// A process of the host, outside any container.
    Host,
}

/// Parses the text of `/proc/<pid>/cgroup`.
///
/// If both cgroup versions are mounted, the line of version 2 may be `/`. A line that names a pod
/// wins over a line that names only a container.
#[must_use]
pub fn owner(text: &str) -> CgroupOwner {
    let mut lines: Vec<(usize, CgroupOwner)> = text.lines().filter_map(line).collect();
    lines.sort_by_key(|(rank, owner)| (certainty(owner), *rank));
    lines.into_iter().next().map_or(CgroupOwner::Host, |(_, owner)| owner)
}

fn certainty(owner: &CgroupOwner) -> usize {
    match owner {
        CgroupOwner::Pod { container: Some(_), .. } => 0,
        CgroupOwner::Pod { .. } => 1,
        CgroupOwner::Container(_) => 2,
        CgroupOwner::Host => 3,
    }
}

/// Parses `hierarchy:controllers:path`. The path may contain colons.
fn line(text: &str) -> Option<(usize, CgroupOwner)> {
    let mut parts = text.splitn(3, ':');
    let (_hierarchy, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let order = ["memory", "cpu", "pids", "name=systemd"];
    let named = |wanted: &&str| controllers.split(',').any(|controller| controller == *wanted);
    let rank = order.iter().position(named).unwrap_or(order.len());
    Some((rank, owner_of_path(path.strip_suffix(" (deleted)").unwrap_or(path))))
}

fn owner_of_path(path: &str) -> CgroupOwner {
    let path = path.to_ascii_lowercase();
    // If kubelet and runtime use different cgroup drivers, colons separate pod and container
    // within one component.
    let components: Vec<&str> = path.split(['/', ':']).filter(|part| !part.is_empty()).collect();
    // The first pod wins: in a cluster that runs inside a pod, the node's kubelet knows the outer
    // pod.
    let pod = components.iter().enumerate().find_map(|(place, component)| Some((place, pod_uid(component)?)));
    match pod {
        Some((place, uid)) => {
            let container = components[place + 1..].iter().find_map(|component| container_id(component));
            CgroupOwner::Pod { uid, container }
        }
        None => components
            .iter()
            .find_map(|component| container_id(component))
            .map_or(CgroupOwner::Host, CgroupOwner::Container),
    }
}

/// Parses `pod<uid>` or `[<root>-]kubepods[-burstable|-besteffort]-pod<uid>`, with or without
/// `.slice`.
fn pod_uid(component: &str) -> Option<String> {
    let name = component.strip_suffix(".slice").unwrap_or(component);
    let text = match name.rfind("-pod") {
        Some(at) if name[..at].contains("kubepods") => &name[at + 4..],
        Some(_) => return None,
        None => name.strip_prefix("pod")?,
    };
    is_uid(text).then(|| text.replace('_', "-"))
}

/// Returns whether `text` is a pod UID: groups of 8, 4, 4, 4 and 12 hexadecimal digits as written
/// by the API server, or 32 digits as the kubelet writes them for static pods.
fn is_uid(text: &str) -> bool {
    let groups: Vec<&str> = text.split(['-', '_']).collect();
    let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
    let hex = groups.iter().all(|group| group.bytes().all(|byte| byte.is_ascii_hexdigit()));
    hex && matches!(lengths.as_slice(), [8, 4, 4, 4, 12] | [32])
}

/// Parses a container ID: 64 hexadecimal digits, with or without the runtime's name in front.
/// The runtime's monitor process (`conmon`) is not part of the container.
fn container_id(component: &str) -> Option<String> {
    let name = component.strip_suffix(".scope").unwrap_or(component);
    let (runtime, id) = name.rsplit_once('-').unwrap_or(("", name));
    let hex = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    (hex && !runtime.ends_with("conmon")).then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "8dbc5577-d0e2-4706-8787-57d52c03ddf2";
    const SLICE_UID: &str = "8dbc5577_d0e2_4706_8787_57d52c03ddf2";
    const OTHER_UID: &str = "11111111-2222-3333-4444-555555555555";
    const STATIC_UID: &str = "c0ffee00c0ffee00c0ffee00c0ffee00";
    const ID: &str = "13f12d5b8a9e2b7f55f6d58a8ba5f0a3ad4d6e1f3b2c4d5e6f708192a3b4c5d6";
    const OTHER_ID: &str = "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff";

    fn in_pod(uid: &str) -> CgroupOwner {
        CgroupOwner::Pod { uid: uid.into(), container: Some(ID.into()) }
    }

    fn check(text: &str, expected: &CgroupOwner) {
        let written = text
            .replace("{uid}", UID)
            .replace("{slice}", SLICE_UID)
            .replace("{other}", OTHER_UID)
            .replace("{static}", STATIC_UID)
            .replace("{id2}", OTHER_ID)
            .replace("{id}", ID);
        assert_eq!(owner(&written), *expected, "{text}");
    }

    #[test]
    fn finds_the_pod_and_container_in_every_known_path_form() {
        for path in [
            // cgroupfs.
            "0::/kubepods/pod{uid}/{id}",
            "0::/kubepods/burstable/pod{uid}/{id}",
            "0::/kubepods/besteffort/pod{uid}/{id}",
            "0::/kubepods/besteffort/pod{uid}/crio-{id}",
            "0::/custom-root/kubepods/pod{uid}/{id}",
            // systemd.
            "0::/kubepods.slice/kubepods-pod{slice}.slice/cri-containerd-{id}.scope",
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/cri-containerd-{id}.scope",
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/crio-{id}.scope/container",
            "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{slice}.slice/docker-{id}.scope",
            // A kubelet that uses systemd with a runtime that does not: one component with colons.
            "0::/system.slice/containerd.service/kubepods-burstable-pod{slice}.slice:cri-containerd:{id}",
            // kind and minikube: the node itself is a container.
            "0::/docker/{id2}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{slice}.slice/cri-containerd-{id}.scope",
            // Seen from a private cgroup namespace of another pod.
            "0::/../../kubepods-besteffort-pod{slice}.slice/cri-containerd-{id}.scope",
            "0::/../../../kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/cri-containerd-{id}.scope",
            "0::/../../../kubepods-pod{slice}.slice/cri-containerd-{id}.scope",
            "0::/../../pod{uid}/{id}",
            // Groups below the container.
            "0::/kubepods/pod{uid}/{id}/init.scope",
            "0::/kubepods/pod{uid}/{id}/docker/{id2}",
            "0::/kubepods/pod{uid}/{id}/kubepods/pod{other}/{id2}",
            // The process has ended, but its parent has not collected its exit status yet.
            "0::/kubepods/pod{uid}/{id} (deleted)",
            // cgroup version 1, with the lines in any order.
            "12:memory:/kubepods/burstable/pod{uid}/{id}\n11:cpu,cpuacct:/kubepods/burstable/pod{uid}/{id}\n1:name=systemd:/kubepods/burstable/pod{uid}/{id}\n",
            "3:pids:/\n1:name=systemd:/kubepods.slice/kubepods-pod{slice}.slice/cri-containerd-{id}.scope",
            // Both versions: the line of version 2 is empty or names the runtime's service.
            "4:memory:/kubepods/pod{uid}/{id}\n0::/",
            "0::/system.slice/containerd.service\n4:memory:/kubepods/pod{uid}/{id}",
            // Upper-case letters.
            "0::/kubepods/pod8DBC5577-D0E2-4706-8787-57D52C03DDF2/{id}",
        ] {
            check(path, &in_pod(UID));
        }
        check("0::/kubepods/burstable/pod{static}/{id}", &in_pod(STATIC_UID));
        check(
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{static}.slice/cri-containerd-{id}.scope",
            &in_pod(STATIC_UID),
        );
    }

    #[test]
    fn finds_the_pod_of_a_process_outside_its_containers() {
        let pod = CgroupOwner::Pod { uid: UID.into(), container: None };
        check("0::/kubepods.slice/kubepods-pod{slice}.slice", &pod);
        check("0::/kubepods.slice/kubepods-pod{slice}.slice/crio-conmon-{id}.scope", &pod);
        check("0::/kubepods/pod{uid}/shim", &pod);
    }

    #[test]
    fn finds_containers_that_belong_to_no_pod() {
        for path in [
            "0::/docker/{id}",
            "0::/system.slice/docker-{id}.scope",
            "0::/machine.slice/libpod-{id}.scope/container",
            "0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{id}.scope",
            // A container of the reader's own pod, from a private cgroup namespace.
            "0::/../cri-containerd-{id}.scope",
            "9:memory:/docker/{id}\n0::/",
        ] {
            check(path, &CgroupOwner::Container(ID.into()));
        }
    }

    #[test]
    fn reports_everything_else_as_a_host_process() {
        for path in [
            "0::/",
            "",
            "nonsense",
            "0::/system.slice/x.service",
            "0::/user.slice/user-1000.slice/session-3.scope",
            "0::/system.slice/crio-conmon-{id}.scope",
            "0::/machine.slice/libpod-conmon-{id}.scope",
            // Similar to a pod or container, but invalid.
            "0::/kubepods/pod8dbc5577/abc",
            "0::/podman-{uid}/x",
            "0::/tripod-{uid}",
            "0::/{id}0",
        ] {
            check(path, &CgroupOwner::Host);
        }
    }

    proptest::proptest! {
        #[test]
        fn never_panics(text in ".{0,200}", path in "(/|:|pod|kubepods|-pod|.slice|[0-9a-f_-]{1,40}){0,12}") {
            let _ = owner(&text);
            let _ = owner(&format!("0::{path}"));
        }

        #[test]
        fn ignores_components_before_and_after_the_pod(before in "(/[a-z.-]{1,9}){0,3}", after in "(/[a-z.]{1,9}){0,3}") {
            proptest::prop_assert_eq!(owner(&format!("0::{before}/kubepods/pod{UID}/{ID}{after}")), in_pod(UID));
        }
    }
}
