//! Whether a container is held to its share by the library, and what it is given for that.

use std::collections::BTreeMap;

use tessera_core::grant::Hold;
use tessera_limits::{files, limits::ShareMeaning};
use tessera_node::device_plugin::Allocation;
use tessera_wire::kubelet::{
    cdi,
    container_response::disables_cgpu,
    device_plugin::{CdiDevice, Mount},
};

/// The pod annotation by which a pod asks not to be held to its share: `off`.
pub const OPT_OUT: &str = "tessera.dev/isolation";

/// How the containers of a node are held to their shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Isolation {
    /// The library, or why there is none.
    pub library: Result<InstalledLibrary, String>,
    /// What becomes of shares without a library.
    pub without_library: WithoutLibrary,
    /// Whether a pod may ask not to be held to its share.
    pub allow_opt_out: bool,
    /// What a percentage of compute means.
    pub meaning: ShareMeaning,
    /// Whether processes that use what they were not given are killed.
    pub kill_escaped: bool,
}

/// The library, as it lies on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstalledLibrary {
    /// The folder with [`FILE`](Self::FILE) and [`PRELOAD`](Self::PRELOAD).
    pub folder: String,
    /// Whether the runtime brings it in by its CDI name.
    pub by_cdi: bool,
}

impl InstalledLibrary {
    /// The library's file in its folder.
    pub const FILE: &str = "libtessera.so";

    /// The file in its folder that has it loaded into every process.
    pub const PRELOAD: &str = "ld.so.preload";

    /// Where a container has the library.
    pub const IN_CONTAINER: &str = "/usr/lib/tessera/libtessera.so";

    /// Where the loader of a container looks for what to load first.
    const PRELOAD_IN_CONTAINER: &str = "/etc/ld.so.preload";

    /// The mounts that bring it in, from node to container.
    #[must_use]
    pub fn mounts(&self) -> [(String, &'static str); 2] {
        [
            (format!("{}/{}", self.folder, Self::FILE), Self::IN_CONTAINER),
            (format!("{}/{}", self.folder, Self::PRELOAD), Self::PRELOAD_IN_CONTAINER),
        ]
    }
}

/// What becomes of shares on a node without the library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WithoutLibrary {
    /// They are refused.
    #[default]
    Refuse,
    /// They are granted, and nothing holds the containers to them.
    Serve,
}

/// What holds a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Enforcement {
    /// The library.
    ByLibrary(InstalledLibrary),
    /// Nothing.
    None(NotEnforced),
}

/// Why nothing holds a container to its share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotEnforced {
    /// It has whole GPUs: there is nobody to share with.
    WholeGpus,
    /// Its pod asked for it.
    PodOptedOut,
    /// The node is labelled so.
    NodeLabel,
    /// There is no library on this node.
    NoLibrary(String),
}

impl Isolation {
    /// What holds a container that is given `hold` of each of its GPUs.
    ///
    /// # Errors
    /// When it must be held, and cannot.
    pub(super) fn of(
        &self,
        hold: Hold,
        pod_annotations: &BTreeMap<String, String>,
        node_labels: Option<&BTreeMap<String, String>>,
    ) -> Result<Enforcement, String> {
        if hold == Hold::Whole {
            return Ok(Enforcement::None(NotEnforced::WholeGpus));
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
            (Err(reason), WithoutLibrary::Refuse) => Err(format!(
                "this node cannot hold a container to its share of a GPU: {reason}; \
                 ask for whole GPUs, or have its administrator install the library"
            )),
        }
    }
}

/// Whether a pod asks not to be held to its share.
pub(super) fn asks_to_opt_out(annotations: &BTreeMap<String, String>) -> bool {
    annotations.get(OPT_OUT).is_some_and(|value| value == "off")
}

impl Enforcement {
    /// Adds what the container needs to be held. The directory can only be read; the account in it can be written, for
    /// every process of the container keeps its own ledger there.
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
    use tessera_core::units::{MiB, Percent};

    use super::*;

    const SHARE: Hold = Hold::Share { compute_percent: Percent(30), memory: MiB(1024) };

    fn isolation(
        library: Result<bool, &str>,
        without_library: WithoutLibrary,
        allow_opt_out: bool,
    ) -> Isolation {
        let library = library
            .map(|by_cdi| InstalledLibrary { folder: "/grants/.library".into(), by_cdi })
            .map_err(str::to_owned);
        Isolation {
            library,
            without_library,
            allow_opt_out,
            meaning: ShareMeaning::Time,
            kill_escaped: false,
        }
    }

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn who_is_held_by_what() {
        let (refuse, serve) = (WithoutLibrary::Refuse, WithoutLibrary::Serve);
        let out = map(&[(OPT_OUT, "off")]);
        let label = map(&[("cgpu.disable.isolation", "true")]);
        let none = BTreeMap::new();
        let held =
            Enforcement::ByLibrary(InstalledLibrary { folder: "/grants/.library".into(), by_cdi: false });
        let no_library = Enforcement::None(NotEnforced::NoLibrary("x is missing".into()));
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
                isolation(Err("x is missing"), refuse, false),
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
            (isolation(Err("x is missing"), serve, false), SHARE, &none, &none, Some(no_library)),
            (isolation(Err("x is missing"), refuse, false), SHARE, &none, &none, None),
        ] {
            assert_eq!(isolation.of(hold, pod, Some(node)).ok(), expected);
        }
        let refused = isolation(Err("x is missing"), refuse, false).of(SHARE, &none, None).unwrap_err();
        assert!(refused.contains("x is missing; ask for whole GPUs"), "{refused}");
    }

    #[test]
    fn what_is_mounted() {
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
