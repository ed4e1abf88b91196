//! The gRPC services of a [`DevicePlugin`].

use std::{pin::Pin, sync::Arc};

use tessera_wire::kubelet::{
    DEVICE_PLUGIN_TYPE, DEVICE_PLUGIN_VERSION, HEALTHY, UNHEALTHY,
    device_plugin::{self as proto, device_plugin_server::DevicePluginServer},
    plugin_registration::{self, registration_server::RegistrationServer},
};
use tokio::sync::mpsc;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tokio_util::sync::CancellationToken;
use tonic::{
    Request, Response, Status,
    transport::{Server, server::Router},
};

use super::{DevicePlugin, PluginDevice, PluginRefusal, PreferenceRequest};

/// Options of every plugin: the kubelet calls GetPreferredAllocation, and PreStartContainer before
/// each start.
pub(super) const OPTIONS: proto::DevicePluginOptions =
    proto::DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: true };

/// Answers the kubelet's calls for registration and for devices.
#[derive(Debug)]
pub(super) struct Service<P> {
    pub(super) plugin: Arc<P>,
    pub(super) resource: Arc<str>,
    /// Ends the device streams, which would otherwise prevent the server from stopping.
    pub(super) stop: CancellationToken,
}

// Implemented by hand, because `P` need not be `Clone`.
impl<P> Clone for Service<P> {
    fn clone(&self) -> Self {
        Self { plugin: self.plugin.clone(), resource: self.resource.clone(), stop: self.stop.clone() }
    }
}

impl<P: DevicePlugin> Service<P> {
    /// Returns a server for registration and devices.
    pub(super) fn router(self) -> Router {
        Server::builder()
            .add_service(RegistrationServer::new(self.clone()))
            .add_service(DevicePluginServer::new(self))
    }
}

#[tonic::async_trait]
impl<P: DevicePlugin> proto::device_plugin_server::DevicePlugin for Service<P> {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<proto::ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<proto::Empty>,
    ) -> Result<Response<proto::DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    async fn list_and_watch(
        &self,
        _: Request<proto::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let mut devices = self.plugin.devices();
        let stop = self.stop.clone();
        let (messages, stream) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let all = devices.borrow_and_update().iter().map(device_message).collect();
                if messages.send(Ok(proto::ListAndWatchResponse { devices: all })).await.is_err() {
                    return;
                }
                tokio::select! {
                    changed = devices.changed() => if changed.is_err() { return },
                    () = stop.cancelled() => return,
                    () = messages.closed() => return,
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<proto::PreferredAllocationRequest>,
    ) -> Result<Response<proto::PreferredAllocationResponse>, Status> {
        let mut container_responses = Vec::new();
        for container in request.into_inner().container_requests {
            let wish = PreferenceRequest {
                available: container.available_device_i_ds,
                required: container.must_include_device_i_ds,
                count: usize::try_from(container.allocation_size).unwrap_or_default(),
            };
            let device_i_ds = self.plugin.prefer(wish).await.map_err(refused)?;
            container_responses.push(proto::ContainerPreferredAllocationResponse { device_i_ds });
        }
        Ok(Response::new(proto::PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<proto::AllocateRequest>,
    ) -> Result<Response<proto::AllocateResponse>, Status> {
        let mut container_responses = Vec::new();
        for container in request.into_inner().container_requests {
            container_responses.push(self.plugin.allocate(container.devices_ids).await.map_err(refused)?);
        }
        Ok(Response::new(proto::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<proto::PreStartContainerRequest>,
    ) -> Result<Response<proto::PreStartContainerResponse>, Status> {
        self.plugin.pre_start(request.into_inner().devices_ids).await.map_err(refused)?;
        Ok(Response::new(proto::PreStartContainerResponse {}))
    }
}

#[tonic::async_trait]
impl<P: DevicePlugin> plugin_registration::registration_server::Registration for Service<P> {
    async fn get_info(
        &self,
        _: Request<plugin_registration::InfoRequest>,
    ) -> Result<Response<plugin_registration::PluginInfo>, Status> {
        Ok(Response::new(plugin_registration::PluginInfo {
            r#type: DEVICE_PLUGIN_TYPE.into(),
            name: self.resource.to_string(),
            endpoint: String::new(),
            supported_versions: vec![DEVICE_PLUGIN_VERSION.into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<plugin_registration::RegistrationStatus>,
    ) -> Result<Response<plugin_registration::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            tracing::info!(resource = %self.resource, "registered the device plugin with the kubelet");
        } else {
            tracing::error!(resource = %self.resource, error = status.error, "the kubelet rejected the registration; pods cannot use this resource");
        }
        Ok(Response::new(plugin_registration::RegistrationStatusResponse {}))
    }
}

fn device_message(device: &PluginDevice) -> proto::Device {
    proto::Device {
        id: device.id.clone(),
        health: if device.healthy { HEALTHY } else { UNHEALTHY }.into(),
        topology: device.numa_node.map(|id| proto::TopologyInfo { nodes: vec![proto::NumaNode { id }] }),
    }
}

fn refused(PluginRefusal(reason): PluginRefusal) -> Status {
    Status::resource_exhausted(reason)
}
