"""sha256 of every wheel of the tool chain, as the package index had them when its versions were chosen.

pip installs nothing else under these names, wherever it downloads it from. A new version in
:mod:`mindspeed_fx.ascend.toolchain` needs its rows.
"""

from __future__ import annotations

HASHES: dict[str, dict[str, str]] = {
    "torch_npu==2.11.0.post3": {
        "cp310-cp310-manylinux_2_28_aarch64": "0caa0e278953de0214a7be0d634fb22e745450734de9c65af97b9f2844143220",
        "cp310-cp310-manylinux_2_28_x86_64": "d022e9d5834530d3297770a068375fd70285e3e71c91f70caa864f2905d6a14d",
        "cp311-cp311-manylinux_2_28_aarch64": "30da6f628cf87095843d1b432401ded34c5e7345089ed1303b9980ca7fd5f177",
        "cp311-cp311-manylinux_2_28_x86_64": "7489f67010989c56ed39deb6e25cb809c4d2cc99e7cc3426386e044c4ee8b55d",
        "cp312-cp312-manylinux_2_28_aarch64": "7d1284333a63671da1df222a1185f3997eafcaa533fe3d9e4aacad556eb27e04",
        "cp312-cp312-manylinux_2_28_x86_64": "d1fe63be65c5c8af588bf0aae75c15bc51c183e3d4a093b130c1e2f357feb5e7",
        "cp313-cp313-manylinux_2_28_aarch64": "7fcc5ed00e9b4a0827b14ed392f3586b81119b4b3678e317860d44d3f2c6ff3b",
        "cp313-cp313-manylinux_2_28_x86_64": "0264928185091c11b79c0670df990c4aab8e1f775ca24c52a644ed3245bbca1d",
    },
    "torch_npu==2.12.0.post3": {
        "cp310-cp310-manylinux_2_28_aarch64": "26f745cd551f13aca0ef6b1ef577de3c60564a42944569ba0d0eb94a083e81fc",
        "cp310-cp310-manylinux_2_28_x86_64": "677c5f5520ea3e9d00299599829b539dbf166ce30e03bd8b4a75b11134859d1d",
        "cp311-cp311-manylinux_2_28_aarch64": "2a4a605404021689af7b13dd676651b151130c49326fc7054ed58fe4884e5d33",
        "cp311-cp311-manylinux_2_28_x86_64": "70776a5afc58c3291efb38bcce8a83284fb3285758bd4472b9d47841788a2be1",
        "cp312-cp312-manylinux_2_28_aarch64": "d553e741081ca9cbc672175281b486c9c3b06676928590087f9afa70f0bceb6b",
        "cp312-cp312-manylinux_2_28_x86_64": "3173b1e960216c5fa1ecbece6dde9537087cc313692f89ff0fe17b59ca3fdd57",
        "cp313-cp313-manylinux_2_28_aarch64": "7f9a1492527d85871c757642461710f9cd167a4771b00c9e42b21857afa0f4c7",
        "cp313-cp313-manylinux_2_28_x86_64": "b49b6317ca740e3ebf94f9918b92097ba624b870237015b3c16210ba3d8eed3f",
    },
    "torch_npu==2.13.0": {
        "cp310-cp310-manylinux_2_28_aarch64": "da6b7785ce005a5459308ad7c88104a5739865d6f23d453dd53ff967c7e17200",
        "cp310-cp310-manylinux_2_28_x86_64": "3084a5ebdab53d45acbbf3154f7cb45d1e00c463b76f0b9b2149b96c1f12ba67",
        "cp311-cp311-manylinux_2_28_aarch64": "d0e64a90b3e640b0274511e47c65284d3a7dedae5f6ad2b95d91de12ff9a29ff",
        "cp311-cp311-manylinux_2_28_x86_64": "0deb809cf447d3fce636ccfdc9c9f874950f1fe76f18f4aaab31e2d345f7dac0",
        "cp312-cp312-manylinux_2_28_aarch64": "ebb895735bf3c347e8c971c3f9083bb5ec032a1b139876ce019f03ee408d81fa",
        "cp312-cp312-manylinux_2_28_x86_64": "f27cf44167b6e0a4b8cf82097c688d2bf532edf503d3e5d6a7ced80a7e759ea6",
        "cp313-cp313-manylinux_2_28_aarch64": "359a055deaf9b94de35ffadff2e68e9fb4a3b3576796ed3617e85d16a42df259",
        "cp313-cp313-manylinux_2_28_x86_64": "20441bfb56c4054a427560ff413fa033db921b993e06c3d67d0f7edc23d40513",
    },
    "torch_npu==2.14.0": {
        "cp310-cp310-manylinux_2_28_aarch64": "2eb6358345efb1294d753a05a5ed99794060ac989cd8dae4b6836a1e831eabd9",
        "cp310-cp310-manylinux_2_28_x86_64": "e6348fe7e16c6f91e5b758bb1f80f471220cadaab8f79495a62ae50dedd29e75",
        "cp311-cp311-manylinux_2_28_aarch64": "fa4c9782c003938dc70f073597b18539a170026cacc4645e33af7433f73e406b",
        "cp311-cp311-manylinux_2_28_x86_64": "7736f7d82cf9f16c7dfc4537f7e7c638153da760273a193455e70857f912189e",
        "cp312-cp312-manylinux_2_28_aarch64": "67c47e96a8fe83e299b3ef0bcd4310321901433b6970ad377e2aef37416d6db3",
        "cp312-cp312-manylinux_2_28_x86_64": "e920a8cdd1aec09baaacba428144aff38cef889e09746360a4fed00b5de9c077",
        "cp313-cp313-manylinux_2_28_aarch64": "025eafbb24652bbc53eec0383fad95acb560abe016a6f033a9d871ebc551d50d",
        "cp313-cp313-manylinux_2_28_x86_64": "e577c4990e3757cdad322f5be48e725b81b594dd8f26787336fac6cc5bd10a2a",
    },
    "triton-ascend==3.2.0": {
        "cp310-cp310-manylinux_2_27_aarch64": "430d4d30265fc8baa8ab75d09a6282002ce2ec2a7a82eb427cbf8521a7975795",
        "cp310-cp310-manylinux_2_27_x86_64": "35e0ef063e4ec917028adc7f21274fd8cd5fd948c2cd9922c526d6a0dabe31f9",
        "cp311-cp311-manylinux_2_27_aarch64": "69a9aecd6fa8b0beb798d16989bb24bc8a1ad61ded71526d6099d4179c428043",
        "cp311-cp311-manylinux_2_27_x86_64": "17c8d7161eed1e96a286281963fe04d3113ee85affaa5d82c7dd0c35803962f0",
    },
    "ascendnpu-ir==1.2.0": {
        "cp310-cp310-manylinux_2_28_aarch64": "4676f8102b5ff9068fb744145d3ad3eec6ed6b0f01e890074ba2cd14c8a8fdb2",
        "cp310-cp310-manylinux_2_28_x86_64": "2de850a55d4029d30d3d09c7f1f6bbc36e5c8730c09126370eb01ae0cdd4e9f0",
        "cp311-cp311-manylinux_2_28_aarch64": "76aaaedd3c4a08148a690f1bdddf2e2668f484989ab261fdb7e19cdba5d0f957",
        "cp311-cp311-manylinux_2_28_x86_64": "d4e5bfab877ee4ba7b312885f4f5bf646072fd47c88d5aa96f6a11f67d3e8522",
        "cp312-cp312-manylinux_2_28_aarch64": "44bf314a819ad6678f07fa954d7c5d622734cc404a373698d588d8f87d75a144",
        "cp312-cp312-manylinux_2_28_x86_64": "5a1e4a9ac83c66760d1ee3862206bdc9edae1f212e5ceb569b96926e27b4f2c9",
        "cp313-cp313-manylinux_2_28_aarch64": "fcc8ab0a513493da5b61bb7b7837a7e90da2b73934723bb67d7706eac7d161d3",
        "cp313-cp313-manylinux_2_28_x86_64": "11db65643cf8528a3da9aa13802d57a258385ae97deafcdc1ff4ff19f04db4a6",
    },
    "pybind11==3.1.0": {
        "py3-none-any": "b8488090f8acffbcb6b5d6a85571a6827a0a2981ffb75e5a0b27b87c4a6b7dd0",
    },
    "torch-mlir==20261001": {
        "cp310-cp310-macosx_11_0_arm64": "e6d27a9bda1d82d215b6fb6da6d3507aebd50ffb0ebfd29e7d070d1dcf27b985",
        "cp310-cp310-manylinux_2_27_aarch64": "c39f542d6483b7dc0ade2f666d1ecd6070de8c832dcbdb152220562b170a0d03",
        "cp310-cp310-manylinux_2_27_x86_64": "4b2e6754e6854e9eec5d2a80c86e1d29cf4963800b9c021deb22d424ce6bf95a",
        "cp311-cp311-macosx_11_0_arm64": "51d0672a8c0a198d6bc27a9dafd917e11c04203197b736d1127396034d18ab2e",
        "cp311-cp311-manylinux_2_27_aarch64": "ce024fba1d9ff527e9eef1e4ed2da9caec28bf69fafd7d22d82ac1a210fe1abe",
        "cp311-cp311-manylinux_2_27_x86_64": "3fb6cc11d248f1ece7149cf21cc40f528b9c6f45424464678485db2c83c199af",
        "cp312-abi3-macosx_11_0_arm64": "16cc340633b96b77231836d09a955005063a4907b576b03c1681a8b1f3feb357",
        "cp312-abi3-manylinux_2_27_aarch64": "60e950689052bcb2629c727350af445fd76afda1469ab32d00837b05670d834b",
        "cp312-abi3-manylinux_2_27_x86_64": "e02ab29293ec2eba0a573ef20a154ecafd0ab1e8b305979fca2e2ac0b48e2b34",
    },
}
"""Requirement -> Python, ABI and platform of a wheel -> its sha256."""
