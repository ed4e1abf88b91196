//! The requests of kube-scheduler as golden files, which tests of the crate wire use.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Recorded;
use crate::harness::Harness;

/// Compares the requests with the files, or writes the files again.
pub(crate) fn compare_or_record(harness: &Harness, scheduler: &str, calls: Vec<Recorded>) -> Result<()> {
    for Recorded { verb, body } in calls {
        let mut request: Value =
            serde_json::from_slice(&body).with_context(|| format!("{verb} got no JSON"))?;
        scrub(&mut request);
        let file = directory().join(format!("{verb}-{scheduler}.json"));
        let fresh = format!("{request:#}\n");
        if harness.record {
            fs::create_dir_all(directory())?;
            fs::write(&file, &fresh)?;
            harness.note(&format!("wrote {}", file.display()));
        }
        let known = fs::read_to_string(&file).with_context(|| format!("{} is missing", file.display()))?;
        ensure!(
            known == fresh,
            "{verb} differs from {}; if kube-scheduler has changed, run e2e/run extender --record. The request is now:\n{fresh}",
            file.display()
        );
    }
    Ok(())
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/wire/tests/extender")
}

/// Replaces values that differ between runs, and sorts the nodes, whose order is random.
fn scrub(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (key, field) in fields {
                match (key.as_str(), &mut *field) {
                    ("uid" | "PodUID", Value::String(text)) => {
                        *text = "11111111-2222-3333-4444-555555555555".into()
                    }
                    ("resourceVersion", Value::String(text)) => *text = "1".into(),
                    ("creationTimestamp" | "time", Value::String(text)) => {
                        *text = "2026-01-01T00:00:00Z".into()
                    }
                    ("NodeNames", Value::Array(names)) => names.sort_by_key(Value::to_string),
                    ("items", Value::Array(nodes)) => {
                        nodes.iter_mut().for_each(scrub);
                        nodes.sort_by_key(|node| node["metadata"]["name"].to_string());
                    }
                    _ => scrub(field),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(scrub),
        _ => {}
    }
}
