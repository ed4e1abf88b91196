//! A gate between Prometheus and a page: while it is closed, the page does not answer.

use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A listener that passes connections on to a page while it is open.
pub(crate) struct Gate {
    pub(crate) address: SocketAddr,
    is_open: watch::Sender<bool>,
}

impl Gate {
    /// Starts a gate in front of `target`.
    pub(crate) async fn start(target: SocketAddr, is_open: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (is_open, state) = watch::channel(is_open);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, target, state.clone()));
            }
        });
        Self { address, is_open }
    }

    pub(crate) fn open(&self) {
        self.is_open.send_replace(true);
    }

    /// Closes the gate and all connections through it.
    pub(crate) fn close(&self) {
        self.is_open.send_replace(false);
    }
}

async fn pass(mut client: TcpStream, target: SocketAddr, mut state: watch::Receiver<bool>) {
    if !*state.borrow() {
        return;
    }
    let Ok(mut page) = TcpStream::connect(target).await else { return };
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut client, &mut page) => {}
        _ = state.wait_for(|is_open| !is_open) => {}
    }
}
