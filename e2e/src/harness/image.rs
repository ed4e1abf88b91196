//! Container images, built from static programs of this host.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest, Sha256};
use tar::{EntryType, Header};

/// Name of the image. Its registry does not exist, so nothing can be pulled.
pub(crate) const IMAGE: &str = "e2e.invalid/busybox:1";

/// Commands that scenarios use in addition to `busybox`.
const COMMANDS: [&str; 8] = ["sh", "cat", "echo", "env", "ls", "sleep", "test", "true"];

/// Writes the image with this static busybox in the format of `docker save`, which containerd imports.
pub(crate) fn write_archive(path: &Path, busybox: &Path) -> Result<()> {
    write(path, IMAGE, &layer(busybox)?)
}

/// Writes an image with one static program at `place`.
pub(crate) fn write_program(path: &Path, image: &str, place: &str, program: &Path) -> Result<()> {
    let content = fs::read(program).with_context(|| program.display().to_string())?;
    let mut layer = tar::Builder::new(Vec::new());
    append_file(&mut layer, place, &content, 0o755)?;
    write(path, image, &layer.into_inner()?)
}

fn write(path: &Path, image: &str, layer: &[u8]) -> Result<()> {
    let digest = Sha256::digest(layer).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let config = json!({
        "architecture": architecture(),
        "os": "linux",
        "config": { "Cmd": ["/bin/sleep", "2147483647"], "Env": ["PATH=/bin"] },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{digest}")] },
    });
    let manifest = json!([{ "Config": "config.json", "RepoTags": [image], "Layers": ["layer.tar"] }]);

    let mut archive = tar::Builder::new(Vec::new());
    append_file(&mut archive, "layer.tar", layer, 0o644)?;
    append_file(&mut archive, "config.json", config.to_string().as_bytes(), 0o644)?;
    append_file(&mut archive, "manifest.json", manifest.to_string().as_bytes(), 0o644)?;
    fs::write(path, archive.into_inner()?).with_context(|| format!("cannot write {}", path.display()))
}

fn layer(busybox: &Path) -> Result<Vec<u8>> {
    let busybox = fs::read(busybox)
        .with_context(|| format!("{} is missing (package busybox-static)", busybox.display()))?;
    let mut layer = tar::Builder::new(Vec::new());
    for directory in ["bin/", "etc/", "tmp/"] {
        let mut header = Header::new_ustar();
        header.set_entry_type(EntryType::Directory);
        header.set_size(0);
        header.set_mode(0o755);
        layer.append_data(&mut header, directory, &[][..])?;
    }
    append_file(&mut layer, "bin/busybox", &busybox, 0o755)?;
    for command in COMMANDS {
        let mut header = Header::new_ustar();
        header.set_entry_type(EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o777);
        layer.append_link(&mut header, format!("bin/{command}"), "busybox")?;
    }
    Ok(layer.into_inner()?)
}

fn append_file(archive: &mut tar::Builder<Vec<u8>>, name: &str, content: &[u8], mode: u32) -> Result<()> {
    let mut header = Header::new_ustar();
    header.set_size(u64::try_from(content.len())?);
    header.set_mode(mode);
    archive.append_data(&mut header, name, content)?;
    Ok(())
}

/// Returns the architecture as images name it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
