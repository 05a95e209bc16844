"""Logs of NCCL (NCCL_DEBUG=INFO), written by hand after its sources, 2.18 to 2.27.

No GPU has written them. Hosts and addresses are invented.
"""

# NCCL 2.18: bus ids instead of device numbers.
OLD_SHARED_MEMORY = b"""\
gpu-a:411:411 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>
gpu-a:411:411 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : \
libnccl-net.so: cannot open shared object file: No such file or directory
gpu-a:411:411 [0] NCCL INFO cudaDriverVersion 12020
NCCL version 2.18.6+cuda12.1
gpu-a:411:530 [0] NCCL INFO Failed to open libibverbs.so[.1]
gpu-a:411:530 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>
gpu-a:411:530 [0] NCCL INFO Using network Socket
gpu-a:411:530 [0] NCCL INFO comm 0x55d0c8 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 100000 \
- Init START
gpu-a:411:530 [0] NCCL INFO Channel 00/02 :    0   1   2   3
gpu-a:411:530 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] 1/-1/-1->0->-1
gpu-a:411:530 [0] NCCL INFO P2P Chunksize set to 131072
gpu-a:411:530 [0] NCCL INFO Channel 00/0 : 0[100000] -> 1[200000] via P2P/IPC/read
gpu-a:411:530 [0] NCCL INFO Channel 01 : 3[d00000] -> 0[100000] via SHM/direct/direct
gpu-a:411:530 [0] NCCL INFO Connected all rings
"""

# NCCL 2.21: InfiniBand with GPUDirect RDMA, one connection by the NIC of rank 3 (PXN).
INFINIBAND = b"""\
gpu-a:19:19 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
gpu-a:19:19 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>
NCCL version 2.21.5+cuda12.4
gpu-a:19:240 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB [RO]; \
OOB eth0:10.0.0.4<0>
gpu-a:19:240 [0] NCCL INFO Using non-device net plugin version 0
gpu-a:19:240 [0] NCCL INFO Using network IB
gpu-a:19:240 [0] NCCL INFO Channel 00/16 :    0   7   6   5   4   3   2   1   8  15
gpu-a:19:240 [0] NCCL INFO Channel 00/0 : 9[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
gpu-a:19:240 [0] NCCL INFO Channel 01/0 : 0[0] -> 8[0] [send] via NET/IB/3(3)/GDRDMA/Shared
gpu-a:19:240 [0] NCCL INFO Channel 00/0 : 0[0] -> 7[7] via P2P/CUMEM/read
gpu-a:19:240 [0] NCCL INFO Connected all rings
gpu-a:19:251 [0] NCCL INFO NCCL_NET_GDR_LEVEL set by environment to PIX
"""

# NCCL 2.27: the fallback when the device plugin hands out no NIC.
SOCKETS = b"""\
[2026-01-15 09:30:00] gpu-b:20:20 [0] NCCL INFO ENV/Plugin: Could not find: libnccl-env.so
gpu-b:20:233 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 0.
gpu-b:20:233 [0] NCCL INFO NET/IB : No device found.
gpu-b:20:233 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.0.0.5<0>
gpu-b:20:233 [0] NCCL INFO Failed to initialize NET plugin IB
gpu-b:20:233 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>
gpu-b:20:233 [0] NCCL INFO Initialized NET plugin Socket
gpu-b:20:233 [0] NCCL INFO Using network Socket
gpu-b:20:233 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/Socket/0
gpu-b:20:233 [0] NCCL INFO Channel 00/0 : 8[0] -> 9[1] via P2P/CUMEM
gpu-b:20:233 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [send] via NET/Socket/0
"""

# NCCL 2.27: a plugin whose name has a space, and peer memory through PCIe.
PLUGIN = b"""\
gpu-c:9:77 [2] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 4 nics)
gpu-c:9:77 [2] NCCL INFO Using network AWS Libfabric
gpu-c:9:77 [2] NCCL INFO Channel 03/0 : 2[2] -> 12[4] [send] via NET/AWS Libfabric/1/GDRDMA(PCI)
gpu-c:9:77 [2] NCCL INFO Channel 03/0 : 2[2] -> 3[3] via P2P/direct pointer
gpu-c:9:77 [2] NCCL INFO Channel 04/0 : 2[2] -> 5[5] via P2P/indirect/4[4]
"""

# NCCL 2.23 with the plugin of HPC-X, without GPUDirect RDMA.
HPCX = b"""\
gpu-d:31:300 [0] NCCL INFO P2P plugin v9 IBext_v9
gpu-d:31:300 [0] NCCL INFO Using network IBext_v9
gpu-d:31:300 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IBext_v9/0
"""

# NCCL 2.27: networks are found, and no rank has connected yet.
NOT_CONNECTED = SOCKETS.partition(b"gpu-b:20:233 [0] NCCL INFO Channel")[0]
