//! The objects in `deploy/`.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use k8s_openapi::api::rbac::v1::Subject;
use serde_json::Value;

use super::{Cluster, effect::user_name};

impl Cluster {
    /// Creates the objects of a file in `deploy/` and waits until the rights among them are in effect.
    pub(crate) async fn create_shipped(&self, file: &str) -> Result<()> {
        let text = fs::read_to_string(deploy().join(file)).with_context(|| file.to_owned())?;
        let mut users = BTreeSet::new();
        for document in text.split("\n---\n").filter(|document| document.contains("\nkind: ")) {
            let request = axum::http::Request::post(path_of(document))
                .header("content-type", "application/yaml")
                .body(document.as_bytes().to_vec())?;
            let created = self.client().request::<Value>(request).await;
            let created = created.with_context(|| format!("{file}: {document}"))?;
            if created["kind"].as_str().is_some_and(|kind| kind.ends_with("RoleBinding")) {
                let subjects: Vec<Subject> = serde_json::from_value(created["subjects"].clone())?;
                users.extend(subjects.iter().map(user_name));
            }
        }
        for user in users {
            self.wait_for_rights(&user).await?;
        }
        Ok(())
    }
}

/// Returns the root of the repository, or of the bundle that `e2e/gpu` runs in.
pub(crate) fn repository() -> PathBuf {
    std::env::var_os("TESSERA_E2E_REPOSITORY")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), PathBuf::from)
}

/// Returns the directory `deploy`.
pub(crate) fn deploy() -> PathBuf {
    repository().join("deploy")
}

/// Returns the path at which the object of a manifest is created.
fn path_of(document: &str) -> String {
    let field = |name: &str| {
        document
            .lines()
            .find_map(|line| line.trim_start().strip_prefix(name))
            .map(str::trim)
            .unwrap_or_default()
    };
    let plural = match field("kind: ") {
        "ValidatingAdmissionPolicy" => "validatingadmissionpolicies".to_owned(),
        "NetworkPolicy" => "networkpolicies".to_owned(),
        "DeviceClass" => "deviceclasses".to_owned(),
        other => format!("{}s", other.to_lowercase()),
    };
    let group = match field("apiVersion: ") {
        "v1" => "/api/v1".to_owned(),
        other => format!("/apis/{other}"),
    };
    let is_namespaced = matches!(
        plural.as_str(),
        "configmaps"
            | "leases"
            | "secrets"
            | "services"
            | "networkpolicies"
            | "serviceaccounts"
            | "roles"
            | "rolebindings"
            | "daemonsets"
            | "deployments"
    );
    if is_namespaced {
        format!("{group}/namespaces/kube-system/{plural}")
    } else {
        format!("{group}/{plural}")
    }
}
