//! Requests of a node's agent about dynamic resource allocation: its own slice, and the claims of its pods.

use futures::{Stream, StreamExt};
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::json;
use tessera_wire::foreign::dra::{ResourceClaim, SliceSpec};

use super::{NodeClient, WriteFailure, log_failures, with_timeout};
use crate::{LeanClaim, LeanSlice, Selection, watch::config};

impl NodeClient {
    /// Watches the slice of this name, which a driver has for this node. Yields `None` while it does not exist.
    pub fn watch_slice(&self, driver: &str, name: &str) -> impl Stream<Item = Option<SliceSpec>> + use<> {
        let slices: Api<LeanSlice> = Api::all(self.client.clone());
        let fields = format!("spec.nodeName={},spec.driver={driver},metadata.name={name}", self.node);
        let config = config(&Selection { fields: Some(fields), ..Selection::default() });
        let events = watcher(slices, config).default_backoff();
        let mut is_listed = false;
        events.inspect(log_failures("resourceslices")).filter_map(move |event| {
            let change = match event {
                Ok(watcher::Event::Init) => {
                    is_listed = false;
                    None
                }
                Ok(watcher::Event::InitApply(slice)) => {
                    is_listed = true;
                    Some(Some(slice.spec))
                }
                Ok(watcher::Event::Apply(slice)) => Some(Some(slice.spec)),
                Ok(watcher::Event::InitDone) => (!is_listed).then_some(None),
                Ok(watcher::Event::Delete(_)) => Some(None),
                Err(_watch_restarts) => None,
            };
            async move { change }
        })
    }

    /// Creates or replaces the slice of this name and returns it as the API server has stored it. The slice is
    /// deleted with the node's object, which has `node_uid`.
    pub async fn write_slice(
        &self,
        name: &str,
        node_uid: &str,
        spec: &SliceSpec,
    ) -> Result<SliceSpec, WriteFailure> {
        let slices: Api<LeanSlice> = Api::all(self.client.clone());
        let written = |metadata: ObjectMeta| LeanSlice { metadata, spec: spec.clone() };
        let parameters = PostParams::default();
        let stored = match self.write(slices.get_opt(name)).await? {
            Some(present) if present.spec.offers_same(spec) => present,
            Some(present) => {
                self.write(slices.replace(name, &parameters, &written(present.metadata))).await?
            }
            None => {
                let owner = json!([{
                    "apiVersion": "v1", "kind": "Node", "name": self.node, "uid": node_uid, "controller": true,
                }]);
                let metadata = ObjectMeta {
                    name: Some(name.to_owned()),
                    owner_references: serde_json::from_value(owner).unwrap_or_default(),
                    ..ObjectMeta::default()
                };
                self.write(slices.create(&parameters, &written(metadata))).await?
            }
        };
        Ok(stored.spec)
    }

    /// Reads a claim from the API server's store, not from its cache.
    pub async fn read_claim(&self, namespace: &str, name: &str) -> Result<ResourceClaim, WriteFailure> {
        let claims: Api<LeanClaim> = Api::namespaced(self.client.clone(), namespace);
        Ok(with_timeout(self.timeouts.write, claims.get(name)).await?.into())
    }
}
