//! A plugin to which the kubelet connects through `plugins_registry`.

use std::fs;

use tessera_node::device_plugin::{PluginDevice, RegistrationMode};
use tessera_wire::kubelet::{
    device_plugin::{
        AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, Empty,
        ListAndWatchResponse, PreferredAllocationRequest, device_plugin_client::DevicePluginClient,
    },
    plugin_registration::{InfoRequest, registration_client::RegistrationClient},
};

use crate::plugin::{RESOURCE, Running, SOCKET, dial, with_timeout};

fn ids_and_health(message: ListAndWatchResponse) -> Vec<(String, String)> {
    message.devices.into_iter().map(|device| (device.id, device.health)).collect()
}

#[tokio::test]
async fn returns_its_info_and_reports_device_changes() {
    let directory = tempfile::tempdir().unwrap();
    let running = Running::start(RegistrationMode::PluginsRegistry(directory.path().into()));
    let channel = dial(&directory.path().join(SOCKET)).await;

    let info = RegistrationClient::new(channel.clone()).get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DevicePlugin", RESOURCE));
    assert_eq!(info.endpoint, "", "the same socket serves the devices");
    assert_eq!(info.supported_versions, ["v1beta1"]);

    let mut client = DevicePluginClient::new(channel);
    let mut devices = client.list_and_watch(Empty {}).await.unwrap().into_inner();
    let first = devices.message().await.unwrap().unwrap();
    assert_eq!(first.devices[0].topology.as_ref().unwrap().nodes[0].id, 1);
    let pair = |id: &str, health: &str| (id.to_owned(), health.to_owned());
    assert_eq!(ids_and_health(first), [pair("good", "Healthy"), pair("broken", "Unhealthy")]);
    running.plugin.devices.send_modify(|all| {
        all.clear();
        all.push(PluginDevice { id: "new".into(), healthy: true, numa_node: None });
    });
    let second = with_timeout("the change", devices.message()).await.unwrap().unwrap();
    assert_eq!(ids_and_health(second), [pair("new", "Healthy")]);

    running.stop().await;
    let ended = with_timeout("the end of the stream", devices.message()).await;
    assert!(matches!(ended, Ok(None) | Err(_)), "{ended:?}");
    assert!(!directory.path().join(SOCKET).exists());
}

#[tokio::test]
async fn answers_and_rejects_calls() {
    let directory = tempfile::tempdir().unwrap();
    let running = Running::start(RegistrationMode::PluginsRegistry(directory.path().into()));
    let mut client = DevicePluginClient::new(dial(&directory.path().join(SOCKET)).await);

    let wish = ContainerPreferredAllocationRequest {
        available_device_i_ds: vec!["a".into(), "b".into(), "c".into()],
        must_include_device_i_ds: vec!["c".into()],
        allocation_size: 2,
    };
    let wishes = PreferredAllocationRequest { container_requests: vec![wish] };
    let preferred = client.get_preferred_allocation(wishes).await.unwrap().into_inner();
    assert_eq!(preferred.container_responses[0].device_i_ds, ["c", "a"]);

    let allocate = |id: &str| AllocateRequest {
        container_requests: vec![ContainerAllocateRequest { devices_ids: vec![id.into()] }],
    };
    let given = client.allocate(allocate("good")).await.unwrap().into_inner();
    assert_eq!(given.container_responses[0].envs["IDS"], "good");
    let refused = client.allocate(allocate("broken")).await.unwrap_err();
    assert_eq!(refused.message(), "this GPU is broken");
    running.stop().await;
}

#[tokio::test]
async fn opens_its_socket_again_after_it_is_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join(SOCKET);
    let running = Running::start(RegistrationMode::PluginsRegistry(directory.path().into()));
    drop(dial(&socket).await);
    fs::remove_file(&socket).unwrap();
    let mut client = RegistrationClient::new(dial(&socket).await);
    assert_eq!(client.get_info(InfoRequest {}).await.unwrap().into_inner().name, RESOURCE);
    running.stop().await;
}

#[tokio::test]
async fn replaces_the_socket_of_an_earlier_process() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join(SOCKET);
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    assert!(socket.exists());
    let running = Running::start(RegistrationMode::PluginsRegistry(directory.path().into()));
    drop(dial(&socket).await);
    running.stop().await;
}
