use futures::StreamExt as _;
use serde_json::json;
use tessera_agent::{controller::Event, shell::Cluster as _};
use tessera_cluster::node_agent::NodeClient;
use tessera_sim::apiserver::ApiServer;

use crate::common::with_timeout;

#[tokio::test(flavor = "multi_thread")]
async fn reports_a_missing_node_and_its_creation_and_deletion() {
    let api = ApiServer::start().await.unwrap();
    let client = tessera_cluster::connect_to(&api.url()).unwrap();
    api.create("/api/v1/nodes", json!({ "metadata": { "name": "another" } })).unwrap();
    let events = NodeClient::new(client, "node-1".to_owned()).watch().map(Event::from);
    let changes = events.filter_map(|event| async move {
        match event {
            Event::Node(node) => Some(Some(node.metadata.name)),
            Event::NodeMissing => Some(None),
            _ => None,
        }
    });
    let mut changes = std::pin::pin!(changes);
    let mut next = async || with_timeout("a change of the node", changes.next()).await.unwrap();
    assert_eq!(next().await, None);
    api.create("/api/v1/nodes", json!({ "metadata": { "name": "node-1" } })).unwrap();
    assert_eq!(next().await.as_deref(), Some("node-1"));
    api.delete("/api/v1/nodes/node-1").unwrap();
    assert_eq!(next().await, None);
}
