//! Fixtures that several targets share.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tessera_limits::files::{self, OwnedMapping, StaticMapping};
use tessera_limits::{Control, GrantLimits, MemoryAccount};
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::parsed_node::{self, ParsedNode};

/// Returns a node with two GPUs that serves every dialect.
///
/// # Panics
/// If the fixture itself cannot be parsed.
#[must_use]
pub fn node() -> ParsedNode {
    let node = serde_json::from_str(include_str!("../fixtures/node.json")).expect("the fixture is JSON");
    parsed_node::parse(&node, MemoryUnit::GiB).expect("the fixture is a node")
}

/// Returns a pod with one container of each dialect.
///
/// # Panics
/// If the fixture itself cannot be parsed.
#[must_use]
pub fn pod() -> Pod {
    serde_json::from_str(include_str!("../fixtures/pod.json")).expect("the fixture is a pod")
}

/// A grant in a temporary directory, made by the agent's own writer and mapped like in a container.
pub struct Grant {
    directory: PathBuf,
    /// The control file, as the agent maps it.
    pub control: OwnedMapping<Control>,
    /// The account file, as the container maps it.
    pub account: StaticMapping<MemoryAccount>,
}

impl Grant {
    /// Calls `f` with the grant of this process.
    ///
    /// # Panics
    /// If the files cannot be created.
    pub fn with<T>(f: impl FnOnce(&Self) -> T) -> T {
        thread_local!(static GRANT: Grant = Grant::create().expect("the temporary directory is writable"));
        GRANT.with(f)
    }

    fn create() -> std::io::Result<Self> {
        let directory = std::env::temp_dir().join(format!("tessera-fuzz-{}", std::process::id()));
        let control = files::create_grant(&directory, &GrantLimits::default())?;
        Ok(Self { account: files::open_account(&directory)?, control, directory })
    }

    /// Returns the directory of the grant.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// Returns the content of a file.
    ///
    /// # Panics
    /// If the file cannot be read.
    #[must_use]
    pub fn read(&self, path: &Path) -> Vec<u8> {
        std::fs::read(path).expect("the file exists")
    }

    /// Clears the account, which stays mapped.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn clear_account(&self) {
        let zeros = vec![0; size_of::<MemoryAccount>()];
        let file = std::fs::OpenOptions::new().write(true).open(files::account_path(&self.directory));
        file.and_then(|file| file.write_all_at(&zeros, 0)).expect("the account is writable");
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
