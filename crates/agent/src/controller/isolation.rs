//! Decides whether the library enforces a container's share, and what the container mounts for it.

use std::collections::BTreeMap;

use tessera_core::{
    grant::Hold,
    units::{MiB, Percent},
};
use tessera_limits::{files, limits::ShareMeaning};
use tessera_node::device_plugin::Allocation;
use tessera_wire::kubelet::{
    cdi,
    container_response::disables_cgpu,
    device_plugin::{CdiDevice, Mount},
};

use super::{LibraryError, NotEnforceable};

/// Pod annotation with which a pod asks not to be held to its share, by the value `off`.
pub const OPT_OUT: &str = "tessera.dev/isolation";

/// How the containers of a node are held to their shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Isolation {
    /// The installed library, or why there is none.
    pub library: Result<InstalledLibrary, LibraryError>,
    /// Treatment of shares while there is no library.
    pub without_library: WithoutLibrary,
    /// Whether requests for shares are served. Otherwise the node serves whole GPUs only.
    pub serve_shares: bool,
    /// Whether pods may ask not to be held to their share.
    pub allow_opt_out: bool,
    /// Whether a change of a running pod's ceiling counts. Otherwise the ceiling stays as it was when
    /// the container was granted.
    pub allow_ceiling_changes: bool,
    /// Whether containers may borrow memory that no pod was granted, as the annotation of their pod says.
    pub lend_memory: bool,
    /// Meaning of a percentage of compute.
    pub meaning: ShareMeaning,
    /// Treatment of processes that use more than they were granted.
    pub on_escape: OnEscape,
}

/// What the agent does about a process that uses more than its container was granted. Every escape is
/// also reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnEscape {
    /// Nothing else.
    #[default]
    Report,
    /// The agent stops and continues the process, so that it gets no more than its share of time.
    Throttle,
    /// The agent kills the process.
    Kill,
}

/// The library as it is installed on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstalledLibrary {
    /// Folder with [`FILE`](Self::FILE) and [`PRELOAD`](Self::PRELOAD).
    pub folder: String,
    /// Whether the container runtime mounts the library as a CDI device.
    pub by_cdi: bool,
}

impl InstalledLibrary {
    /// Name of the library in its folder.
    pub const FILE: &str = "libtessera.so";

    /// Name of the file, in the same folder, that makes the loader preload the library.
    pub const PRELOAD: &str = "ld.so.preload";

    /// Path of the library in a container.
    pub const IN_CONTAINER: &str = "/usr/lib/tessera/libtessera.so";

    /// Path in a container where the loader finds what to preload.
    const PRELOAD_IN_CONTAINER: &str = "/etc/ld.so.preload";

    /// Returns the mounts of the library, each as path on the node and path in the container.
    #[must_use]
    pub fn mounts(&self) -> [(String, &'static str); 2] {
        [
            (format!("{}/{}", self.folder, Self::FILE), Self::IN_CONTAINER),
            (format!("{}/{}", self.folder, Self::PRELOAD), Self::PRELOAD_IN_CONTAINER),
        ]
    }
}

/// Treatment of shares on a node without the library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WithoutLibrary {
    /// Containers with shares are refused.
    #[default]
    Refuse,
    /// Containers with shares are served, and nothing enforces the shares.
    Serve,
}

/// Whether a container's share is enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Enforcement {
    /// The library in the container enforces the share.
    ByLibrary(InstalledLibrary),
    /// Nothing enforces a share.
    None(NotEnforced),
}

/// Why nothing holds a container to a share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotEnforced {
    /// The container has whole GPUs and shares them with no other container.
    WholeGpus,
    /// The pod opted out.
    PodOptedOut,
    /// A label of the node disables enforcement.
    NodeLabel,
    /// The library is not installed on this node.
    NoLibrary(LibraryError),
}

impl Isolation {
    /// Returns whether a node with these labels refuses the shares of all pods.
    pub(super) fn refuses_all_shares(&self, node_labels: &BTreeMap<String, String>) -> bool {
        let share = Hold::Share { compute_percent: Percent::ZERO, memory: MiB::ZERO };
        let may_opt_out = self.serve_shares && self.allow_opt_out;
        !may_opt_out && self.enforcement(share, &BTreeMap::new(), Some(node_labels)).is_err()
    }

    /// Returns how a container that holds `hold` of each of its GPUs is held to it.
    ///
    /// # Errors
    /// Fails if the node serves no shares, or the share must be enforced and the library is missing.
    pub(super) fn enforcement(
        &self,
        hold: Hold,
        pod_annotations: &BTreeMap<String, String>,
        node_labels: Option<&BTreeMap<String, String>>,
    ) -> Result<Enforcement, NotEnforceable> {
        if hold == Hold::Whole {
            return Ok(Enforcement::None(NotEnforced::WholeGpus));
        }
        if !self.serve_shares {
            return Err(NotEnforceable::SharesOff);
        }
        if node_labels.is_some_and(disables_cgpu) {
            return Ok(Enforcement::None(NotEnforced::NodeLabel));
        }
        if self.allow_opt_out && asks_to_opt_out(pod_annotations) {
            return Ok(Enforcement::None(NotEnforced::PodOptedOut));
        }
        match (&self.library, self.without_library) {
            (Ok(library), _) => Ok(Enforcement::ByLibrary(library.clone())),
            (Err(reason), WithoutLibrary::Serve) => {
                Ok(Enforcement::None(NotEnforced::NoLibrary(reason.clone())))
            }
            (Err(reason), WithoutLibrary::Refuse) => Err(NotEnforceable::NoLibrary(reason.clone())),
        }
    }
}

/// Returns whether a pod asks not to be held to its share.
pub(super) fn asks_to_opt_out(annotations: &BTreeMap<String, String>) -> bool {
    annotations.get(OPT_OUT).is_some_and(|value| value == "off")
}

impl Enforcement {
    /// Adds the mounts that the library needs to an `Allocate` answer.
    ///
    /// The grant directory is mounted read-only. The account in it is writable, because every
    /// process of the container charges its memory there.
    pub(super) fn add_to(&self, given: &mut Allocation, grant_directory: &str) {
        let Self::ByLibrary(library) = self else { return };
        let mut mount = |host: String, container: String, read_only: bool| {
            given.mounts.push(Mount { container_path: container, host_path: host, read_only });
        };
        mount(grant_directory.to_owned(), files::GRANT_DIRECTORY.to_owned(), true);
        mount(
            format!("{grant_directory}/{}", files::ACCOUNT),
            format!("{}/{}", files::GRANT_DIRECTORY, files::ACCOUNT),
            false,
        );
        if library.by_cdi {
            given.cdi_devices.push(CdiDevice { name: cdi::LIBRARY.to_owned() });
        } else {
            for (host, container) in library.mounts() {
                mount(host, container.to_owned(), true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: Hold = Hold::Share { compute_percent: Percent(30), memory: MiB(1024) };

    fn isolation(
        library: Result<bool, &str>,
        without_library: WithoutLibrary,
        allow_opt_out: bool,
    ) -> Isolation {
        let library = library
            .map(|by_cdi| InstalledLibrary { folder: "/grants/.library".into(), by_cdi })
            .map_err(missing);
        Isolation {
            library,
            without_library,
            serve_shares: true,
            allow_opt_out,
            allow_ceiling_changes: false,
            lend_memory: true,
            meaning: ShareMeaning::Time,
            on_escape: OnEscape::Report,
        }
    }

    fn missing(path: &str) -> LibraryError {
        LibraryError::NotALibrary { path: path.to_owned() }
    }

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn shares_are_enforced_unless_pod_or_node_opt_out() {
        let (refuse, serve) = (WithoutLibrary::Refuse, WithoutLibrary::Serve);
        let out = map(&[(OPT_OUT, "off")]);
        let label = map(&[("cgpu.disable.isolation", "true")]);
        let none = BTreeMap::new();
        let held =
            Enforcement::ByLibrary(InstalledLibrary { folder: "/grants/.library".into(), by_cdi: false });
        let no_library = Enforcement::None(NotEnforced::NoLibrary(missing("x")));
        for (isolation, hold, pod, node, expected) in [
            (isolation(Ok(false), refuse, false), SHARE, &none, &none, Some(held.clone())),
            (
                isolation(Ok(false), refuse, false),
                Hold::Whole,
                &none,
                &none,
                Some(Enforcement::None(NotEnforced::WholeGpus)),
            ),
            (
                isolation(Err("x"), refuse, false),
                Hold::Whole,
                &none,
                &none,
                Some(Enforcement::None(NotEnforced::WholeGpus)),
            ),
            (isolation(Ok(false), refuse, false), SHARE, &out, &none, Some(held)),
            (
                isolation(Ok(false), refuse, true),
                SHARE,
                &out,
                &none,
                Some(Enforcement::None(NotEnforced::PodOptedOut)),
            ),
            (
                isolation(Ok(false), refuse, false),
                SHARE,
                &none,
                &label,
                Some(Enforcement::None(NotEnforced::NodeLabel)),
            ),
            (isolation(Err("x"), serve, false), SHARE, &none, &none, Some(no_library)),
            (isolation(Err("x"), refuse, false), SHARE, &none, &none, None),
        ] {
            assert_eq!(isolation.enforcement(hold, pod, Some(node)).ok(), expected);
        }
        let refused =
            isolation(Err("x"), refuse, false).enforcement(SHARE, &none, None).unwrap_err().to_string();
        assert!(refused.contains("x is not a shared library; ask for whole GPUs"), "{refused}");
    }

    #[test]
    fn containers_with_shares_mount_the_library_and_their_grant() {
        let mounts = |given: &Allocation| -> Vec<(String, String, bool)> {
            let of = |mount: &Mount| (mount.host_path.clone(), mount.container_path.clone(), mount.read_only);
            given.mounts.iter().map(of).collect()
        };
        let (mut by_mounts, mut by_cdi, mut free) =
            (Allocation::default(), Allocation::default(), Allocation::default());
        let library =
            |by_cdi| Enforcement::ByLibrary(InstalledLibrary { folder: "/grants/.library".into(), by_cdi });
        library(false).add_to(&mut by_mounts, "/grants/u/main");
        library(true).add_to(&mut by_cdi, "/grants/u/main");
        Enforcement::None(NotEnforced::WholeGpus).add_to(&mut free, "/grants/u/main");
        let own = [
            ("/grants/u/main", "/etc/tessera", true),
            ("/grants/u/main/account", "/etc/tessera/account", false),
            ("/grants/.library/libtessera.so", "/usr/lib/tessera/libtessera.so", true),
            ("/grants/.library/ld.so.preload", "/etc/ld.so.preload", true),
        ]
        .map(|(host, container, read_only)| (host.to_owned(), container.to_owned(), read_only));
        assert_eq!(mounts(&by_mounts), own);
        assert_eq!(mounts(&by_cdi), own[..2]);
        assert_eq!(by_cdi.cdi_devices[0].name, "tessera.dev/library=libtessera");
        assert_eq!(free, Allocation::default());
    }
}
