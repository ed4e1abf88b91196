//! Whose process it is, by the text of its `/proc/<pid>/cgroup`.
//!
//! Every kubelet driver, container runtime and version of control groups writes the path in its own way, and a reader in a
//! cgroup namespace of its own sees it cut off at the front. What all have in common: one component names the pod, a later
//! one the container.

/// Whose process it is, as far as the kernel tells.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CgroupOwner {
    /// A container of a pod.
    Pod {
        /// The pod's UID as the kubelet knows it; for static pods that is not the API server's.
        uid: String,
        /// The container's ID; absent for a process of the pod that is in no container.
        container: Option<String>,
    },
    /// A container, of no pod that can be told.
    Container(String),
    /// Nobody's container.
    Host,
}

/// Reads the text of `/proc/<pid>/cgroup`.
///
/// Under both versions of control groups at once, the line of version 2 may say nothing: any line that names a pod wins, then any
/// that names a container.
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

/// `hierarchy:controllers:path`; the path may hold colons of its own.
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
    // With a cgroup driver that the kubelet does not expect, pod and container stand in one component, apart by colons.
    let components: Vec<&str> = path.split(['/', ':']).filter(|part| !part.is_empty()).collect();
    // The first: in a cluster within a pod, the outer pod is the one that the node's kubelet knows.
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

/// `pod<uid>`, or `[<root>-]kubepods[-burstable|-besteffort]-pod<uid>`, with or without `.slice`.
fn pod_uid(component: &str) -> Option<String> {
    let name = component.strip_suffix(".slice").unwrap_or(component);
    let text = match name.rfind("-pod") {
        Some(at) if name[..at].contains("kubepods") => &name[at + 4..],
        Some(_) => return None,
        None => name.strip_prefix("pod")?,
    };
    is_uid(text).then(|| text.replace('_', "-"))
}

/// Eight, four, four, four and twelve hexadecimal digits, as the API server writes a UID; 32 without gaps are a kubelet's own, for a
/// static pod.
fn is_uid(text: &str) -> bool {
    let groups: Vec<&str> = text.split(['-', '_']).collect();
    let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
    let hex = groups.iter().all(|group| group.bytes().all(|byte| byte.is_ascii_hexdigit()));
    hex && matches!(lengths.as_slice(), [8, 4, 4, 4, 12] | [32])
}

/// 64 hexadecimal digits, bare or behind the runtime's name. What watches over a container is not in it.
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
    fn containers_of_pods() {
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
            // A kubelet that expects systemd and a runtime that does not use it: one component with colons.
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
            // Ended, but not yet buried.
            "0::/kubepods/pod{uid}/{id} (deleted)",
            // Version 1, in any order of lines.
            "12:memory:/kubepods/burstable/pod{uid}/{id}\n11:cpu,cpuacct:/kubepods/burstable/pod{uid}/{id}\n1:name=systemd:/kubepods/burstable/pod{uid}/{id}\n",
            "3:pids:/\n1:name=systemd:/kubepods.slice/kubepods-pod{slice}.slice/cri-containerd-{id}.scope",
            // Both at once: version 2 says nothing, or names the runtime's service.
            "4:memory:/kubepods/pod{uid}/{id}\n0::/",
            "0::/system.slice/containerd.service\n4:memory:/kubepods/pod{uid}/{id}",
            // Capitals.
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
    fn pods_without_a_container() {
        let pod = CgroupOwner::Pod { uid: UID.into(), container: None };
        check("0::/kubepods.slice/kubepods-pod{slice}.slice", &pod);
        check("0::/kubepods.slice/kubepods-pod{slice}.slice/crio-conmon-{id}.scope", &pod);
        check("0::/kubepods/pod{uid}/shim", &pod);
    }

    #[test]
    fn containers_without_a_pod() {
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
    fn the_host() {
        for path in [
            "0::/",
            "",
            "nonsense",
            "0::/system.slice/x.service",
            "0::/user.slice/user-1000.slice/session-3.scope",
            "0::/system.slice/crio-conmon-{id}.scope",
            "0::/machine.slice/libpod-conmon-{id}.scope",
            // Nearly, but not.
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
        fn no_text_makes_it_panic(text in ".{0,200}", path in "(/|:|pod|kubepods|-pod|.slice|[0-9a-f_-]{1,40}){0,12}") {
            let _ = owner(&text);
            let _ = owner(&format!("0::{path}"));
        }

        #[test]
        fn whatever_stands_before_and_after_changes_nothing(before in "(/[a-z.-]{1,9}){0,3}", after in "(/[a-z.]{1,9}){0,3}") {
            proptest::prop_assert_eq!(owner(&format!("0::{before}/kubepods/pod{UID}/{ID}{after}")), in_pod(UID));
        }
    }
}
