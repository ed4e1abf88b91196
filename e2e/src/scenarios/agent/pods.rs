//! Pods that request GPUs.

use k8s_openapi::{
    api::core::v1::{self as api, Pod, PodSpec, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity,
};
use kube::api::ObjectMeta;

use crate::harness::IMAGE;

/// Script that prints the environment and the mounted files, and keeps running.
const SCRIPT: &str =
    "env; ls /etc/tessera 2>/dev/null; cat /etc/ld.so.preload 2>/dev/null; echo end; exec sleep 100000";

/// A container, and whether it is an init container.
pub(in crate::scenarios) struct Container(api::Container, bool);

impl Container {
    pub(in crate::scenarios) fn main(name: &str, resources: &[(&str, &str)]) -> Self {
        Self(container(name, SCRIPT, resources), false)
    }

    pub(super) fn running(name: &str, script: &str, resources: &[(&str, &str)]) -> Self {
        Self(container(name, script, resources), false)
    }

    pub(super) fn init(name: &str, resources: &[(&str, &str)]) -> Self {
        Self(container(name, "cat /etc/tessera/control", resources), true)
    }

    pub(super) fn sidecar(name: &str, resources: &[(&str, &str)]) -> Self {
        let restart_policy = Some("Always".into());
        Self(api::Container { restart_policy, ..container(name, SCRIPT, resources) }, true)
    }
}

fn container(name: &str, script: &str, resources: &[(&str, &str)]) -> api::Container {
    let amounts = resources.iter().map(|(name, amount)| ((*name).to_owned(), Quantity((*amount).to_owned())));
    api::Container {
        name: name.into(),
        image: Some(IMAGE.into()),
        image_pull_policy: Some("Never".into()),
        command: Some(["sh", "-c", script].map(str::to_owned).to_vec()),
        resources: Some(ResourceRequirements {
            limits: Some(amounts.collect()),
            ..ResourceRequirements::default()
        }),
        ..api::Container::default()
    }
}

/// Returns a pod that no scheduler handles.
pub(in crate::scenarios) fn asking(name: &str, containers: &[Container]) -> Pod {
    let of = |early: bool| -> Vec<api::Container> {
        containers
            .iter()
            .filter(|container| container.1 == early)
            .map(|container| container.0.clone())
            .collect()
    };
    Pod {
        metadata: ObjectMeta { name: Some(name.into()), ..ObjectMeta::default() },
        spec: Some(PodSpec {
            init_containers: Some(of(true)),
            containers: of(false),
            scheduler_name: Some("nobody".into()),
            restart_policy: Some("Never".into()),
            termination_grace_period_seconds: Some(0),
            automount_service_account_token: Some(false),
            ..PodSpec::default()
        }),
        status: None,
    }
}
